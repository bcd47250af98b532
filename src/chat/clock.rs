//! Dates for templates: `strftime_now`.
//!
//! The time is UTC; the crate reads no time zone.

use std::fmt::Write as _;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

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

/// `time` in the notation of C's `strftime`, or the directive that is not known.
pub(super) fn format(time: SystemTime, format: &str) -> Result<String, String> {
    let seconds = time.duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO).as_secs();
    let (days, second) = (seconds / 86_400, seconds % 86_400);
    let (year, month, day, day_of_year) = date(days);
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    let hour12 = if hour % 12 == 0 { 12 } else { hour % 12 };
    let month_name = MONTHS[month as usize - 1];
    let weekday = WEEKDAYS[((days + 4) % 7) as usize];

    let mut text = String::new();
    let mut rest = format.chars();
    while let Some(c) = rest.next() {
        if c != '%' {
            text.push(c);
            continue;
        }
        let mut directive = rest.next();
        // `%-d` is `%d` without the leading zero.
        let zero = if directive == Some('-') {
            directive = rest.next();
            1
        } else {
            2
        };
        let wrote = match directive {
            Some('Y') => write!(text, "{year}"),
            Some('y') => write!(text, "{:0zero$}", year % 100),
            Some('m') => write!(text, "{month:0zero$}"),
            Some('d') => write!(text, "{day:0zero$}"),
            Some('e') => write!(text, "{day:2}"),
            Some('j') => write!(text, "{day_of_year:03}"),
            Some('H') => write!(text, "{hour:0zero$}"),
            Some('I') => write!(text, "{hour12:0zero$}"),
            Some('M') => write!(text, "{minute:0zero$}"),
            Some('S') => write!(text, "{second:0zero$}"),
            Some('p') => write!(text, "{}", if hour < 12 { "AM" } else { "PM" }),
            Some('B') => write!(text, "{month_name}"),
            Some('b' | 'h') => write!(text, "{}", &month_name[..3]),
            Some('A') => write!(text, "{weekday}"),
            Some('a') => write!(text, "{}", &weekday[..3]),
            Some('F') => write!(text, "{year}-{month:02}-{day:02}"),
            Some('T') => write!(text, "{hour:02}:{minute:02}:{second:02}"),
            Some('Z') => write!(text, "UTC"),
            Some('z') => write!(text, "+0000"),
            Some('%') => write!(text, "%"),
            other => return Err(format!("%{}", other.map(String::from).unwrap_or_default())),
        };
        debug_assert!(wrote.is_ok(), "writing to a string does not fail");
    }
    Ok(text)
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
        let check = |seconds: u64, pattern: &str, expected: &str| {
            assert_eq!(format(UNIX_EPOCH + Duration::from_secs(seconds), pattern).unwrap(), expected);
        };
        check(0, "%A %d %B %Y %T", "Thursday 01 January 1970 00:00:00");
        check(951_782_400, "%F %j", "2000-02-29 060");
        check(1_721_995_200, "%d %b %Y", "26 Jul 2024");
        check(1_735_689_599, "%-d %b %y %I:%M:%S %p %%", "31 Dec 24 11:59:59 PM %");
        check(4_102_444_800, "%a %F", "Fri 2100-01-01");
        check(13_574_563_200, "%F", "2400-02-29");
        assert_eq!(format(UNIX_EPOCH, "%Q"), Err("%Q".to_owned()));
        assert_eq!(format(UNIX_EPOCH, "%"), Err("%".to_owned()));
    }
}
