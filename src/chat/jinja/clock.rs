//! Dates for templates: `strftime_now`, with the directives of Python in the C locale.
//!
//! The time is UTC; the crate reads no time zone.

use std::fmt::Write as _;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use super::Result;
use super::text::Writer;

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const WEEKDAYS: [&str; 7] = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];

/// A moment in the calendar.
struct Moment {
    seconds: u64,
    micros: u32,
    year: i64,
    /// From 1.
    month: u64,
    day: u64,
    day_of_year: u64,
    /// From Sunday, which is 0.
    weekday: u64,
    hour: u64,
    minute: u64,
    second: u64,
}

/// `time` in the notation of `strftime`. Text that is not a directive is unchanged.
pub(super) fn format(time: SystemTime, format: &str) -> Result<String> {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO);
    let moment = Moment::new(since);
    let mut output = Writer::default();
    let mut rest = format;
    while let Some(at) = rest.find('%') {
        output.push(&rest[..at])?;
        let directive = &rest[at + 1..];
        // Flags of glibc: no padding, blanks, zeros, capitals.
        let flag = directive.chars().next().filter(|c| "-_0^".contains(*c));
        let name = &directive[flag.map_or(0, char::len_utf8)..];
        let Some(letter) = name.chars().next() else {
            output.push(&rest[at..])?;
            rest = "";
            break;
        };
        let mut text = String::new();
        let width = moment.write(letter, &mut text);
        match width {
            Some(width) => output.push(&padded(&text, width, flag))?,
            None => output.push(&rest[at..at + 1 + directive.len() - name.len() + letter.len_utf8()])?,
        }
        rest = &name[letter.len_utf8()..];
    }
    output.push(rest)?;
    output.finish()
}

/// How a directive is filled up: digits to a width with zeros or blanks, words not at all.
#[derive(Clone, Copy)]
enum Padding {
    Zeros(usize),
    Blanks(usize),
    Word,
}

fn padded(text: &str, padding: Padding, flag: Option<char>) -> String {
    let (width, fill) = match padding {
        Padding::Zeros(width) => (width, '0'),
        Padding::Blanks(width) => (width, ' '),
        Padding::Word => return if flag == Some('^') { text.to_uppercase() } else { text.to_owned() },
    };
    let fill = match flag {
        Some('-') => return text.to_owned(),
        Some('_') => ' ',
        Some('0') => '0',
        _ => fill,
    };
    let missing = width.saturating_sub(text.len());
    std::iter::repeat_n(fill, missing).chain(text.chars()).collect()
}

impl Moment {
    fn new(since: Duration) -> Self {
        let seconds = since.as_secs();
        let (days, second) = (seconds / 86_400, seconds % 86_400);
        let (year, month, day, day_of_year) = date(days);
        Self {
            seconds,
            micros: since.subsec_micros(),
            year: i64::try_from(year).unwrap_or(i64::MAX),
            month,
            day,
            day_of_year,
            weekday: (days + 4) % 7,
            hour: second / 3600,
            minute: second / 60 % 60,
            second: second % 60,
        }
    }

    /// Writes one directive without padding; none if there is no such directive.
    fn write(&self, letter: char, text: &mut String) -> Option<Padding> {
        let month = MONTHS[self.month as usize - 1];
        let weekday = WEEKDAYS[self.weekday as usize];
        let hour12 = if self.hour.is_multiple_of(12) { 12 } else { self.hour % 12 };
        // Days since Monday.
        let from_monday = (self.weekday + 6) % 7;
        let nested = |pattern: &str, text: &mut String| {
            let mut rest = pattern.chars();
            while let Some(c) = rest.next() {
                if c != '%' {
                    text.push(c);
                    continue;
                }
                let mut part = String::new();
                if let Some(padding) = rest.next().and_then(|letter| self.write(letter, &mut part)) {
                    text.push_str(&padded(&part, padding, None));
                }
            }
            Some(Padding::Word)
        };
        let (wrote, padding) = match letter {
            'Y' => (write!(text, "{}", self.year), Padding::Zeros(1)),
            'C' => (write!(text, "{}", self.year / 100), Padding::Zeros(2)),
            'y' => (write!(text, "{}", self.year % 100), Padding::Zeros(2)),
            'm' => (write!(text, "{}", self.month), Padding::Zeros(2)),
            'd' => (write!(text, "{}", self.day), Padding::Zeros(2)),
            'e' => (write!(text, "{}", self.day), Padding::Blanks(2)),
            'j' => (write!(text, "{}", self.day_of_year), Padding::Zeros(3)),
            'H' => (write!(text, "{}", self.hour), Padding::Zeros(2)),
            'k' => (write!(text, "{}", self.hour), Padding::Blanks(2)),
            'I' => (write!(text, "{hour12}"), Padding::Zeros(2)),
            'l' => (write!(text, "{hour12}"), Padding::Blanks(2)),
            'M' => (write!(text, "{}", self.minute), Padding::Zeros(2)),
            'S' => (write!(text, "{}", self.second), Padding::Zeros(2)),
            'f' => (write!(text, "{:06}", self.micros), Padding::Word),
            's' => (write!(text, "{}", self.seconds), Padding::Word),
            'p' => (write!(text, "{}", if self.hour < 12 { "AM" } else { "PM" }), Padding::Word),
            'P' => (write!(text, "{}", if self.hour < 12 { "am" } else { "pm" }), Padding::Word),
            'B' => (write!(text, "{month}"), Padding::Word),
            'b' | 'h' => (write!(text, "{}", &month[..3]), Padding::Word),
            'A' => (write!(text, "{weekday}"), Padding::Word),
            'a' => (write!(text, "{}", &weekday[..3]), Padding::Word),
            'u' => (write!(text, "{}", from_monday + 1), Padding::Word),
            'w' => (write!(text, "{}", self.weekday), Padding::Word),
            'U' => (write!(text, "{}", (self.day_of_year + 6 - self.weekday) / 7), Padding::Zeros(2)),
            'W' => (write!(text, "{}", (self.day_of_year + 6 - from_monday) / 7), Padding::Zeros(2)),
            'V' => (write!(text, "{}", self.iso_week().1), Padding::Zeros(2)),
            'G' => (write!(text, "{}", self.iso_week().0), Padding::Zeros(1)),
            'g' => (write!(text, "{}", self.iso_week().0 % 100), Padding::Zeros(2)),
            'F' => return nested("%Y-%m-%d", text),
            'T' | 'X' => return nested("%H:%M:%S", text),
            'R' => return nested("%H:%M", text),
            'r' => return nested("%I:%M:%S %p", text),
            'D' | 'x' => return nested("%m/%d/%y", text),
            'c' => return nested("%a %b %e %H:%M:%S %Y", text),
            // A time without a zone, which Python's is, writes none.
            'Z' | 'z' => (Ok(()), Padding::Word),
            'n' => (text.write_char('\n'), Padding::Word),
            't' => (text.write_char('\t'), Padding::Word),
            '%' => (write!(text, "%"), Padding::Word),
            _ => return None,
        };
        debug_assert!(wrote.is_ok(), "writing to a string does not fail");
        Some(padding)
    }

    /// Year and number of the week that ISO 8601 counts this day to: the year of its Thursday.
    fn iso_week(&self) -> (i64, u64) {
        let from_monday = (self.weekday + 6) % 7;
        let thursday = self.day_of_year as i64 + 3 - from_monday as i64;
        if thursday < 1 {
            let days = 365 + i64::from(is_leap(self.year - 1));
            return (self.year - 1, ((thursday + days - 1) / 7 + 1).unsigned_abs());
        }
        let days = 365 + i64::from(is_leap(self.year));
        if thursday > days {
            (self.year + 1, 1)
        } else {
            (self.year, ((thursday - 1) / 7 + 1).unsigned_abs())
        }
    }
}

fn is_leap(year: i64) -> bool {
    year % 4 == 0 && (year % 100 != 0 || year % 400 == 0)
}

/// Year, month, day and day of the year, the last three from 1.
fn date(mut days: u64) -> (u64, u64, u64, u64) {
    let is_leap =
        |year: u64| year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400));
    // 400 years are 146,097 days.
    let mut year = 1970 + days / 146_097 * 400;
    days %= 146_097;
    while days >= 365 + u64::from(is_leap(year)) {
        days -= 365 + u64::from(is_leap(year));
        year += 1;
    }
    let day_of_year = days + 1;
    let february = 28 + u64::from(is_leap(year));
    let mut month = 1;
    for length in [31, february, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31] {
        if days < length {
            break;
        }
        days -= length;
        month += 1;
    }
    (year, month, days + 1, day_of_year)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_dates() {
        // Expected values are Python's: datetime.fromtimestamp(seconds, UTC), without its zone.
        let check = |seconds: u64, pattern: &str, expected: &str| {
            assert_eq!(
                format(UNIX_EPOCH + Duration::from_secs(seconds), pattern).unwrap(),
                expected,
                "{pattern}"
            );
        };
        check(0, "%A %d %B %Y %T", "Thursday 01 January 1970 00:00:00");
        check(951_782_400, "%F %j", "2000-02-29 060");
        check(1_721_995_200, "%d %b %Y", "26 Jul 2024");
        check(1_735_689_599, "%-d %b %y %I:%M:%S %p %%", "31 Dec 24 11:59:59 PM %");
        check(4_102_444_800, "%a %F", "Fri 2100-01-01");
        check(13_574_563_200, "%F", "2400-02-29");
        check(
            1_735_689_599,
            "%c|%x|%X|%D|%R|%r",
            "Tue Dec 31 23:59:59 2024|12/31/24|23:59:59|12/31/24|23:59|11:59:59 PM",
        );
        check(1_735_689_599, "%G-W%V-%u %U %W %w %g %C", "2025-W01-2 52 53 2 25 20");
        check(1_609_459_200, "%G-W%V-%u %U %W %j", "2020-W53-5 00 00 001");
        check(1_735_689_599, "%Z%z|%f|%s|a%nb%t", "|000000|1735689599|a\nb\t");
        check(1_721_995_200, "%_d %^a %e %k %l %-m %-H", "26 FRI 26 12 12 7 12");
        check(0, "%Q %", "%Q %");
    }
}
