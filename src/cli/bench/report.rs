//! The results of `tinyvllm bench`, as a table for people and as JSON for programs.

use std::fmt;

use serde::Serialize;

/// All results. The field names are those of the JSON.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    pub(super) version: &'static str,
    pub(super) model: String,
    pub(super) num_threads: usize,
    pub(super) cpu_level: &'static str,
    pub(super) load_seconds: f64,
    pub(super) peak_memory_bytes: Option<u64>,
    /// Measured memory bandwidth in bytes per second, where it can be measured.
    pub(super) memory_bandwidth: Option<f64>,
    /// Whether generation read faster than that. Then the measurement was disturbed, and fractions are too
    /// large.
    pub(super) memory_bandwidth_disturbed: bool,
    /// Whether the bandwidth is that of reading or of copying.
    pub(super) memory_access: Option<&'static str>,
    /// For one sequence. More sequences read more experts.
    pub(super) weight_bytes_per_step: u64,
    pub(super) kv_bytes_per_token: u64,
    pub(super) prompts: Vec<PromptResult>,
    pub(super) generations: Vec<GenerationResult>,
    pub(super) predictions: Vec<PredictionResult>,
}

/// Generation of one sequence without drafts, and with drafts of a known accuracy.
#[derive(Debug, Serialize)]
pub(super) struct PredictionResult {
    pub(super) context_len: usize,
    pub(super) output_len: usize,
    /// The fraction of predicted tokens that are right.
    pub(super) accuracy: f64,
    pub(super) plain_tokens_per_second: Spread,
    pub(super) tokens_per_second: Spread,
    /// Drafted and accepted tokens.
    pub(super) num_draft_tokens: usize,
    pub(super) num_accepted_tokens: usize,
}

#[derive(Debug, Serialize)]
pub(super) struct PromptResult {
    /// Prompts that are computed together; the rate is their sum.
    pub(super) num_prompts: usize,
    pub(super) num_prompt_tokens: usize,
    /// Cached tokens before the prompt.
    pub(super) depth: usize,
    pub(super) tokens_per_second: Spread,
}

/// Means and medians are over repeats; rates are sums over the sequences of the batch.
#[derive(Debug, Serialize)]
pub(super) struct GenerationResult {
    pub(super) batch_size: usize,
    pub(super) context_len: usize,
    pub(super) output_len: usize,
    pub(super) tokens_per_second: Spread,
    pub(super) bytes_per_second: f64,
    pub(super) bandwidth_fraction: Option<f64>,
    pub(super) dispatches_per_token: f64,
    pub(super) host_microseconds_per_token: f64,
}

/// Minimum, median and maximum of measurements, and the measurements.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct Spread {
    pub(super) min: f64,
    pub(super) median: f64,
    pub(super) max: f64,
    /// In ascending order.
    pub(super) samples: Vec<f64>,
}

impl Spread {
    pub(super) fn of(mut samples: Vec<f64>) -> Self {
        samples.sort_by(f64::total_cmp);
        let last = samples.len().saturating_sub(1);
        let at = |index: usize| samples.get(index).copied().unwrap_or(f64::NAN);
        let median = f64::midpoint(at(last / 2), at(last.div_ceil(2)));
        Self { min: at(0), median, max: at(last), samples }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let (Some(bandwidth), Some(access)) = (self.memory_bandwidth, self.memory_access) {
            write!(f, "memory {:.1} GB/s (measured, {access}) · ", bandwidth / 1e9)?;
        }
        write!(
            f,
            "weights {:.0} MB a step · KV {:.1} kB a token",
            self.weight_bytes_per_step as f64 / 1e6,
            self.kv_bytes_per_token as f64 / 1e3
        )?;
        match self.peak_memory_bytes {
            Some(bytes) => writeln!(f, " · peak memory {:.0} MB\n", bytes as f64 / 1e6)?,
            None => writeln!(f, "\n")?,
        }
        let header = ["", "tokens/s", "min", "max", "GB/s", "of memory", "ops/token", "host µs/token"];
        let mut rows = vec![header.map(str::to_owned)];
        for prompt in &self.prompts {
            let rate = &prompt.tokens_per_second;
            let several = match prompt.num_prompts {
                1 => "prompt".to_owned(),
                num_prompts => format!("{num_prompts} prompts"),
            };
            let name = match prompt.depth {
                0 => format!("{several} of {}", prompt.num_prompt_tokens),
                depth => format!("{several} of {} at {depth}", prompt.num_prompt_tokens),
            };
            let [median, min, max] = [rate.median, rate.min, rate.max].map(|rate| format!("{rate:.1}"));
            let none = String::new;
            rows.push([name, median, min, max, none(), none(), none(), none()]);
        }
        for run in &self.generations {
            let rate = &run.tokens_per_second;
            let [median, min, max] = [rate.median, rate.min, rate.max].map(|rate| format!("{rate:.1}"));
            rows.push([
                format!("generate {} × {} at {}", run.batch_size, run.output_len, run.context_len),
                median,
                min,
                max,
                format!("{:.1}", run.bytes_per_second / 1e9),
                run.bandwidth_fraction
                    .map_or_else(String::new, |fraction| format!("{:.0} %", fraction * 100.0)),
                format!("{:.1}", run.dispatches_per_token),
                format!("{:.0}", run.host_microseconds_per_token),
            ]);
        }
        for run in &self.predictions {
            let PredictionResult { context_len, output_len, accuracy, .. } = run;
            let none = String::new;
            let rates = [
                (format!("generate 1 × {output_len} at {context_len}, drawn"), &run.plain_tokens_per_second),
                (format!("  predicted, {:.0} % right", accuracy * 100.0), &run.tokens_per_second),
            ];
            for (name, rate) in rates {
                let [median, min, max] = [rate.median, rate.min, rate.max].map(|rate| format!("{rate:.1}"));
                rows.push([name, median, min, max, none(), none(), none(), none()]);
            }
        }
        write_table(f, &rows)?;
        if self.memory_bandwidth_disturbed {
            let hint = "so its fraction is over 100 %. Run this again when the machine is idle.";
            writeln!(f, "\nThe bandwidth measurement was disturbed: generation read faster, {hint}")?;
        }
        Ok(())
    }
}

/// The first column is aligned left, the others right.
fn write_table<const N: usize>(f: &mut fmt::Formatter<'_>, rows: &[[String; N]]) -> fmt::Result {
    let mut widths = [0_usize; N];
    for row in rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = cell.chars().count().max(*width);
        }
    }
    for row in rows {
        let mut line = String::new();
        for (column, (cell, width)) in row.iter().zip(widths).enumerate() {
            match column {
                0 => line.push_str(&format!("{cell:<width$}")),
                _ => line.push_str(&format!("  {cell:>width$}")),
            }
        }
        writeln!(f, "{}", line.trim_end())?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_of_even_and_odd_numbers_of_samples() {
        let spread = Spread::of(vec![3.0, 1.0, 2.0]);
        assert_eq!((spread.min, spread.median, spread.max), (1.0, 2.0, 3.0));
        assert_eq!(Spread::of(vec![4.0, 1.0]).median, 2.5);
    }

    fn report() -> Report {
        Report {
            version: "0",
            model: "m".to_owned(),
            num_threads: 2,
            cpu_level: "avx2",
            load_seconds: 0.5,
            peak_memory_bytes: None,
            memory_bandwidth: Some(40e9),
            memory_bandwidth_disturbed: false,
            memory_access: Some("copying"),
            weight_bytes_per_step: 600_000_000,
            kv_bytes_per_token: 22_528,
            prompts: [(0, 123.4), (1_900, 101.0)]
                .map(|(depth, rate)| PromptResult {
                    num_prompts: 1,
                    num_prompt_tokens: 512,
                    depth,
                    tokens_per_second: Spread::of(vec![rate]),
                })
                .into(),
            generations: vec![GenerationResult {
                batch_size: 4,
                context_len: 128,
                output_len: 64,
                tokens_per_second: Spread::of(vec![50.0, 70.0, 60.0]),
                bytes_per_second: 30e9,
                bandwidth_fraction: Some(0.75),
                dispatches_per_token: 34.5,
                host_microseconds_per_token: 120.0,
            }],
            predictions: vec![PredictionResult {
                context_len: 128,
                output_len: 64,
                accuracy: 0.7,
                plain_tokens_per_second: Spread::of(vec![20.0]),
                tokens_per_second: Spread::of(vec![41.0]),
                num_draft_tokens: 70,
                num_accepted_tokens: 50,
            }],
        }
    }

    #[test]
    fn the_table_lines_up() {
        let expected = "\
memory 40.0 GB/s (measured, copying) · weights 600 MB a step · KV 22.5 kB a token

                               tokens/s    min    max  GB/s  of memory  ops/token  host µs/token
prompt of 512                     123.4  123.4  123.4
prompt of 512 at 1900             101.0  101.0  101.0
generate 4 × 64 at 128             60.0   50.0   70.0  30.0       75 %       34.5            120
generate 1 × 64 at 128, drawn      20.0   20.0   20.0
  predicted, 70 % right            41.0   41.0   41.0
";
        assert_eq!(report().to_string(), expected);
    }

    #[test]
    fn a_fraction_above_all_of_the_bandwidth_is_marked() {
        let mut report = report();
        report.generations[0].bandwidth_fraction = Some(1.04);
        report.memory_bandwidth_disturbed = true;
        let text = report.to_string();
        assert!(text.contains("104 %") && text.contains("disturbed"), "{text}");
    }
}
