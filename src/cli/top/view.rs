//! The display of `tinyvllm top`: readings as lines of text.
//!
//! Pure: lines are made for a width and cut to it, so nothing wraps on a narrow terminal.

use std::collections::VecDeque;

use super::readings::{Latency, Readings};
use super::snapshot::Quantile;
use crate::console::{Style, styled};

/// Intervals in the history: more than any terminal has columns.
const MAX_HISTORY: usize = 500;
/// Columns of a bar on a wide terminal.
const BAR_WIDTH: usize = 24;
/// Width from which everything fits.
const WIDE: usize = 68;
/// Columns of the names.
const NAME_WIDTH: usize = 14;

/// Rates of the past intervals, newest last; `None` if the server did not answer.
#[derive(Debug, Clone, Default)]
pub(super) struct History {
    generation: VecDeque<Option<f64>>,
    prompt: VecDeque<Option<f64>>,
}

impl History {
    pub(super) fn push(&mut self, readings: Option<&Readings>) {
        let add = |rates: &mut VecDeque<Option<f64>>, rate: Option<f64>| {
            if rates.len() == MAX_HISTORY {
                rates.pop_front();
            }
            rates.push_back(rate);
        };
        add(&mut self.generation, readings.and_then(|readings| readings.generation_throughput));
        add(&mut self.prompt, readings.and_then(|readings| readings.prompt_throughput));
    }
}

/// The contents of the screen.
#[derive(Debug)]
pub(super) struct Screen<'a> {
    pub(super) url: &'a str,
    /// The readings of the last interval, or the last known ones if the server does not answer.
    pub(super) readings: &'a Readings,
    /// Why there are no newer ones.
    pub(super) problem: Option<&'a str>,
    pub(super) history: &'a History,
}

/// A line: texts with their styles.
type Line = Vec<(Option<Style>, String)>;

impl Screen<'_> {
    /// Lines of at most `width` columns and `height` rows.
    pub(super) fn lines(&self, width: usize, height: usize, with_styles: bool) -> Vec<String> {
        let lines = self.content(width);
        lines.iter().take(height).map(|line| cut(line, width, with_styles)).collect()
    }

    fn content(&self, width: usize) -> Vec<Line> {
        let readings = self.readings;
        let plain = |text: String| (None, text);
        let name = |name: &str| (Some(Style::Dim), format!("{name:<NAME_WIDTH$}"));
        let strong = |text: String| (Some(Style::Bold), text);
        let rate = |value| strong(format!("{:>9}", or_dash(value, show_rate)));

        let mut lines = vec![vec![
            strong("tinyvllm top".to_owned()),
            plain(format!(" · {}", self.url)),
            plain(if readings.models.is_empty() {
                String::new()
            } else {
                format!(" · {}", readings.models.join(", "))
            }),
        ]];
        lines.push(match self.problem {
            Some(problem) => vec![(Some(Style::Error), format!("no answer, retrying: {problem}"))],
            None => vec![(Some(Style::Dim), format!("last {:.1} s", readings.interval.as_secs_f64()))],
        });
        lines.push(Vec::new());
        // On a narrow terminal, columns are narrowed before words are cut.
        let (gap, number_width) = if width < WIDE { (" ", 3) } else { ("  ", 6) };
        lines.push(vec![
            name("requests"),
            strong(format!("{:>9}", or_dash(readings.num_running, show_count))),
            plain(format!(" running{gap}")),
            strong(format!("{:>number_width$}", or_dash(readings.num_waiting, show_count))),
            plain(format!(" waiting{gap}")),
            strong(format!("{:>number_width$}", or_dash(readings.preemptions, show_rate))),
            plain(" preempted/s".to_owned()),
        ]);
        let usage = readings.kv_cache_usage;
        let blocks = readings.kv_cache_blocks;
        let blocks = blocks.map(|(num, size)| format!("  {num} blocks of {size}")).unwrap_or_default();
        let bar_width = width.saturating_sub(NAME_WIDTH + 9 + 2 + blocks.chars().count()).min(BAR_WIDTH);
        lines.push(vec![
            name("KV cache"),
            strong(format!("{:>9}", or_dash(usage, show_fraction))),
            plain(format!("  {}", bar(usage.unwrap_or(0.0), bar_width))),
            plain(blocks),
        ]);
        lines.push(vec![
            name("prefix cache"),
            strong(format!("{:>9}", or_dash(readings.prefix_cache_hit_rate, show_fraction))),
            plain(" of the prompt tokens".to_owned()),
        ]);
        if readings.external_hit_rate.is_some() {
            lines.push(vec![
                name(readings.external_tier),
                strong(format!("{:>9}", or_dash(readings.external_hit_rate, show_fraction))),
                plain(" of what it lacked".to_owned()),
            ]);
        }
        if readings.draft_acceptance_rate.is_some() {
            lines.push(vec![
                name("drafts"),
                strong(format!("{:>9}", or_dash(readings.draft_acceptance_rate, show_fraction))),
                plain(" of the drafted tokens accepted".to_owned()),
            ]);
        }
        let chart_width = width.saturating_sub(NAME_WIDTH + 9 + 10).min(MAX_HISTORY);
        let chart =
            |rates: &VecDeque<Option<f64>>| plain(format!(" tokens/s  {}", sparkline(rates, chart_width)));
        lines.push(vec![name("prompt"), rate(readings.prompt_throughput), chart(&self.history.prompt)]);
        lines.push(vec![
            name("generation"),
            rate(readings.generation_throughput),
            chart(&self.history.generation),
        ]);
        // Reasons without requests would push out the others.
        let finished = readings.finished.iter().filter(|(_, rate)| **rate > 0.0);
        let finished: Vec<String> =
            finished.map(|(reason, rate)| format!("{reason} {}", show_rate(*rate))).collect();
        let total = (!readings.finished.is_empty()).then(|| readings.finished.values().sum());
        lines.push(vec![name("finished"), rate(total), plain(format!(" a second  {}", finished.join("  ")))]);
        lines.push(Vec::new());
        lines.push(vec![name("latency"), (Some(Style::Dim), format!("{:>9}{:>12}", "median", "95 %"))]);
        for (title, latency) in
            [("first token", readings.ttft), ("next token", readings.itl), ("whole request", readings.e2e)]
        {
            let Latency { median, p95 } = latency;
            lines.push(vec![
                name(title),
                strong(format!("{:>9}", or_dash(median, show_time))),
                plain(format!("{:>12}", or_dash(p95, show_time))),
            ]);
        }
        lines
    }
}

/// The readings in one line, for a log or a pipe.
pub(super) fn one_line(readings: &Readings) -> String {
    let latency = |latency: Latency| {
        format!("{}/{}", or_dash(latency.median, show_time), or_dash(latency.p95, show_time))
    };
    let finished: f64 = readings.finished.values().sum();
    format!(
        "running {} · waiting {} · kv {} · prompt {}/s · generation {}/s · prefix hits {} · finished {}/s · \
         ttft {} · itl {} · e2e {}",
        or_dash(readings.num_running, show_count),
        or_dash(readings.num_waiting, show_count),
        or_dash(readings.kv_cache_usage, show_fraction),
        or_dash(readings.prompt_throughput, show_rate),
        or_dash(readings.generation_throughput, show_rate),
        or_dash(readings.prefix_cache_hit_rate, show_fraction),
        show_rate(finished),
        latency(readings.ttft),
        latency(readings.itl),
        latency(readings.e2e),
    )
}

/// The line with its styles, cut to `width` characters.
fn cut(line: &Line, width: usize, with_styles: bool) -> String {
    let mut left = width;
    let mut shown = String::new();
    for (style, text) in line {
        // Text from the server must not move the cursor.
        let text: String = text.chars().map(|c| if c.is_control() { ' ' } else { c }).take(left).collect();
        left -= text.chars().count();
        match style {
            Some(style) if with_styles && !text.is_empty() => shown.push_str(&styled(&text, *style)),
            _ => shown.push_str(&text),
        }
    }
    shown
}

fn or_dash<T>(value: Option<T>, show: impl Fn(T) -> String) -> String {
    value.map_or_else(|| "–".to_owned(), show)
}

fn show_count(value: f64) -> String {
    format!("{value:.0}")
}

fn show_rate(value: f64) -> String {
    match value {
        0.0 => "0".to_owned(),
        value if value < 9.95 => format!("{value:.1}"),
        value => format!("{value:.0}"),
    }
}

fn show_fraction(value: f64) -> String {
    format!("{:.1} %", value * 100.0)
}

fn show_time(quantile: Quantile) -> String {
    let (sign, seconds) = match quantile {
        Quantile::About(seconds) => ("", seconds),
        Quantile::Above(seconds) => (">", seconds),
    };
    match seconds {
        seconds if seconds < 0.000_999_5 => format!("{sign}{:.0} µs", seconds * 1e6),
        seconds if seconds < 0.099_95 => format!("{sign}{:.1} ms", seconds * 1e3),
        seconds if seconds < 0.999_5 => format!("{sign}{:.0} ms", seconds * 1e3),
        seconds => format!("{sign}{seconds:.2} s"),
    }
}

fn bar(share: f64, width: usize) -> String {
    let num_full = (share.clamp(0.0, 1.0) * width as f64).round() as usize;
    format!("{}{}", "█".repeat(num_full), "░".repeat(width - num_full))
}

/// A chart of the newest `width` rates, scaled to the highest one.
fn sparkline(rates: &VecDeque<Option<f64>>, width: usize) -> String {
    const LEVELS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
    let newest = rates.iter().skip(rates.len().saturating_sub(width));
    let highest = newest.clone().flatten().copied().fold(0.0, f64::max);
    let level = |rate: &f64| match highest > 0.0 {
        true => LEVELS[((rate / highest * 7.0).ceil() as usize).min(7)],
        false => LEVELS[0],
    };
    newest.map(|rate| rate.as_ref().map_or(' ', level)).collect()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn readings() -> Readings {
        Readings {
            models: vec!["demo\x1b[2J".to_owned()],
            interval: Duration::from_secs(1),
            num_running: Some(3.0),
            kv_cache_usage: Some(0.5),
            kv_cache_blocks: Some((64, 32)),
            generation_throughput: Some(123.4),
            finished: [("abort", 0.0), ("length", 0.5), ("stop", 2.0)]
                .map(|(reason, rate)| (reason.to_owned(), rate))
                .into(),
            ttft: Latency { median: Some(Quantile::About(0.0123)), p95: Some(Quantile::Above(2.5)) },
            ..Readings::default()
        }
    }

    #[test]
    fn lines_fit_into_any_terminal() {
        let readings = readings();
        let mut history = History::default();
        (0..MAX_HISTORY + 50).for_each(|_| history.push(Some(&readings)));
        assert_eq!(history.generation.len(), MAX_HISTORY);
        for problem in [None, Some("connection refused")] {
            let screen = Screen { url: "http://x:8000", readings: &readings, problem, history: &history };
            for width in 0..200 {
                for line in screen.lines(width, 100, false) {
                    assert!(line.chars().count() <= width && !line.contains('\x1b'), "{width}: {line}");
                }
            }
            assert_eq!(screen.lines(80, 4, false).len(), 4);
            assert!(screen.lines(80, 40, true).concat().contains("\x1b[1m"));
        }
    }

    #[test]
    fn what_is_shown() {
        let readings = readings();
        let history = History::default();
        let mut screen = Screen { url: "http://x", readings: &readings, problem: None, history: &history };
        let text = screen.lines(100, 50, false).join("\n");
        for wanted in [
            "3 running",
            "– waiting",
            "50.0 %  ████████████░░░░░░░░░░░░  64 blocks of 32",
            "123 tokens/s",
            "2.5 a second  length 0.5  stop 2.0",
            "12.3 ms     >2.50 s",
        ] {
            assert!(text.contains(wanted), "{wanted} is missing in\n{text}");
        }
        // Nothing is cut in 60 columns.
        let narrow = screen.lines(60, 50, false).join("\n");
        for wanted in
            ["3 running   – waiting   – preempted/s", "░  64 blocks of 32\n", "123 tokens/s", "stop 2.0\n"]
        {
            assert!(narrow.contains(wanted), "{wanted} is missing in\n{narrow}");
        }
        screen.problem = Some("refused");
        assert!(screen.lines(100, 50, false)[1].contains("no answer, retrying: refused"));
        let line = one_line(&readings);
        assert!(line.contains("kv 50.0 %") && line.contains("ttft 12.3 ms/>2.50 s"), "{line}");
    }

    #[test]
    fn sparklines() {
        let check = |rates: &[Option<f64>], width, wanted: &str| {
            assert_eq!(sparkline(&rates.iter().copied().collect(), width), wanted);
        };
        check(&[Some(0.0), None, Some(1.0), Some(8.0)], 10, "▁ ▂█");
        check(&[Some(80.0), Some(4.0), Some(8.0)], 2, "▅█");
        check(&[Some(0.0), Some(0.0)], 5, "▁▁");
        check(&[], 5, "");
        check(&[Some(1.0)], 0, "");
    }

    #[test]
    fn numbers() {
        let time = |seconds| show_time(Quantile::About(seconds));
        assert_eq!(time(0.000_25), "250 µs");
        assert_eq!(time(0.001), "1.0 ms");
        assert_eq!(time(0.099_99), "100 ms");
        assert_eq!(time(0.999_9), "1.00 s");
        assert_eq!([0.0, 0.04, 9.96, 1234.5].map(show_rate), ["0", "0.0", "10", "1234"]);
    }
}
