//! A page of metrics, and the differences between two pages.
//!
//! Counters of all engines and models of a server are summed. Each series is compared with its own former
//! value, so a restarted engine, whose counters begin at 0 again, gives no negative numbers.

use std::collections::{BTreeMap, BTreeSet};

use super::prometheus::{self, Series};

/// The series of a page.
#[derive(Debug, Clone, Default)]
pub(super) struct Snapshot {
    values: BTreeMap<Series, f64>,
}

impl Snapshot {
    /// `None` if the page has no metric.
    pub(super) fn parse(page: &str) -> Option<Self> {
        let samples = prometheus::parse(page);
        let values: BTreeMap<Series, f64> =
            samples.into_iter().map(|sample| (sample.series, sample.value)).collect();
        (!values.is_empty()).then_some(Self { values })
    }

    fn named(&self, name: &str) -> impl Iterator<Item = (&Series, f64)> {
        let first = Series { name: name.to_owned(), labels: BTreeMap::new() };
        let is_named = move |(series, _): &(&Series, &f64)| series.name == first.name;
        let from = Series { name: name.to_owned(), labels: BTreeMap::new() };
        self.values.range(from..).take_while(is_named).map(|(series, value)| (series, *value))
    }

    /// The sum of a gauge, under the first of these names on the page.
    pub(super) fn sum(&self, names: &[&str]) -> Option<f64> {
        self.first_of(names, |values| values.iter().sum())
    }

    /// The mean of a gauge, for fractions, which have no meaningful sum.
    pub(super) fn mean(&self, names: &[&str]) -> Option<f64> {
        self.first_of(names, |values| values.iter().sum::<f64>() / values.len() as f64)
    }

    fn first_of(&self, names: &[&str], fold: impl Fn(&[f64]) -> f64) -> Option<f64> {
        names.iter().find_map(|name| {
            let values: Vec<f64> =
                self.named(name).map(|(_, value)| value).filter(|value| value.is_finite()).collect();
            (!values.is_empty()).then(|| fold(&values))
        })
    }

    /// The distinct values of a label on the page.
    pub(super) fn label_values(&self, label: &str) -> BTreeSet<&str> {
        self.values.keys().filter_map(|series| series.label(label)).collect()
    }

    /// The label in the first series with this name that has it.
    pub(super) fn label(&self, name: &str, label: &str) -> Option<&str> {
        self.named(name).find_map(|(series, _)| series.label(label))
    }
}

/// The increases between two pages.
#[derive(Debug, Clone, Copy)]
pub(super) struct Increase<'a> {
    pub(super) before: &'a Snapshot,
    pub(super) after: &'a Snapshot,
}

impl Increase<'_> {
    /// The increase of a counter, under the first of these names that exists. Each name is tried with and
    /// without `_total`, because not every library writes it.
    pub(super) fn of(&self, names: &[&str]) -> Option<f64> {
        self.by_label(names, "").map(|counts| counts.into_values().sum())
    }

    /// The same for each value of a label.
    pub(super) fn by_label(&self, names: &[&str], label: &str) -> Option<BTreeMap<String, f64>> {
        let with_and_without = names.iter().flat_map(|name| [format!("{name}_total"), (*name).to_owned()]);
        for name in with_and_without {
            let mut counts = BTreeMap::new();
            for (series, grown) in self.grown(&name) {
                *counts.entry(series.label(label).unwrap_or_default().to_owned()).or_insert(0.0) += grown;
            }
            if !counts.is_empty() {
                return Some(counts);
            }
        }
        None
    }

    /// The observations of a histogram, under the first of these names that exists.
    pub(super) fn histogram(&self, names: &[&str]) -> Option<Histogram> {
        names.iter().find_map(|name| {
            let mut buckets: Vec<(f64, f64)> = Vec::new();
            for (series, grown) in self.grown(&format!("{name}_bucket")) {
                let Some(bound) = series.label("le").and_then(|bound| bound.parse::<f64>().ok()) else {
                    continue;
                };
                match buckets.iter_mut().find(|(known, _)| *known == bound) {
                    Some((_, count)) => *count += grown,
                    None => buckets.push((bound, grown)),
                }
            }
            buckets.retain(|(bound, _)| !bound.is_nan());
            buckets.sort_by(|(a, _), (b, _)| a.total_cmp(b));
            (!buckets.is_empty()).then_some(Histogram { buckets })
        })
    }

    fn grown(&self, name: &str) -> impl Iterator<Item = (&Series, f64)> {
        let is_count = |(_, value): &(&Series, f64)| value.is_finite();
        self.after.named(name).filter(is_count).map(|(series, after)| {
            let before = self.before.values.get(series).copied().filter(|before| before.is_finite());
            let grown = match before {
                Some(before) if before <= after => after - before,
                // The series is new, or restarted at 0.
                _ => after,
            };
            (series, grown)
        })
    }
}

/// A histogram: pairs of a bound and the number of observations up to it, in ascending order.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Histogram {
    buckets: Vec<(f64, f64)>,
}

/// A quantile, as exact as the histogram allows.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Quantile {
    /// Interpolated within its bucket.
    About(f64),
    /// In the last bucket, which has no upper bound.
    Above(f64),
}

impl Histogram {
    /// The number of observations.
    pub(super) fn count(&self) -> f64 {
        self.buckets.last().map_or(0.0, |(_, count)| *count)
    }

    /// A quantile, computed as by Prometheus's `histogram_quantile`: observations are evenly spread within a
    /// bucket, and the first bucket begins at 0. `None` without observations.
    pub(super) fn quantile(&self, fraction: f64) -> Option<Quantile> {
        let count = self.count();
        if count <= 0.0 {
            return None;
        }
        let rank = count * fraction.clamp(0.0, 1.0);
        // If some series were reset, the counts may not ascend.
        let index = self.buckets.iter().position(|(_, at_most)| *at_most >= rank && *at_most > 0.0)?;
        let (upper, at_most) = self.buckets[index];
        let (lower, below) = match index.checked_sub(1) {
            Some(previous) => self.buckets[previous],
            None => (upper.min(0.0), 0.0),
        };
        if upper.is_infinite() {
            return Some(Quantile::Above(if lower.is_finite() { lower } else { 0.0 }));
        }
        let fraction = if at_most > below { (rank - below) / (at_most - below) } else { 1.0 };
        Some(Quantile::About(lower + (upper - lower) * fraction.clamp(0.0, 1.0)))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn snapshot(page: &str) -> Snapshot {
        Snapshot::parse(page).unwrap()
    }

    #[test]
    fn gauges_of_several_engines() {
        let page = "running{engine=\"0\"} 2\nrunning{engine=\"1\"} 3\nusage{engine=\"0\"} 0.2\nusage{engine=\"1\"} 0.4\n\
                    old 7\nbroken NaN\nruns 9\n";
        let page = snapshot(page);
        assert_eq!(page.sum(&["running"]), Some(5.0));
        assert!((page.mean(&["usage"]).unwrap() - 0.3).abs() < 1e-12);
        assert_eq!(page.sum(&["new", "old"]), Some(7.0));
        assert_eq!((page.sum(&["broken"]), page.sum(&["run"])), (None, None));
        assert_eq!(page.label_values("engine").into_iter().collect::<Vec<_>>(), ["0", "1"]);
        assert!(Snapshot::parse("<html></html>").is_none());
    }

    #[test]
    fn counters_that_grow_begin_and_begin_again() {
        let before = snapshot("a_total{x=\"1\"} 10\na_total{x=\"2\"} 100\nb 5\n");
        let after = snapshot("a_total{x=\"1\"} 14\na_total{x=\"2\"} 3\na_total{x=\"3\"} 2\nb 6\nc NaN\n");
        let increase = Increase { before: &before, after: &after };
        assert_eq!(increase.of(&["a"]), Some(4.0 + 3.0 + 2.0));
        assert_eq!(increase.of(&["b"]), Some(1.0));
        assert_eq!(increase.of(&["z", "b"]), Some(1.0));
        assert_eq!((increase.of(&["c"]), increase.of(&["d"])), (None, None));
        let by_label = increase.by_label(&["a"], "x").unwrap();
        assert_eq!(by_label.into_values().collect::<Vec<_>>(), [4.0, 3.0, 2.0]);
    }

    #[test]
    fn a_histogram_between_two_pages() {
        let page = |low: u32, high: u32| {
            let line = |engine: u32, bound: &str, count: u32| {
                format!("t_bucket{{engine=\"{engine}\",le=\"{bound}\"}} {count}\n")
            };
            let of =
                |engine| [line(engine, "0.5", low), line(engine, "+Inf", high), line(engine, "2.0", high)];
            snapshot(&[of(0), of(1)].concat().concat())
        };
        let (before, after) = (page(5, 7), page(6, 11));
        let histogram = Increase { before: &before, after: &after }.histogram(&["s", "t"]).unwrap();
        assert_eq!(histogram.buckets, [(0.5, 2.0), (2.0, 8.0), (f64::INFINITY, 8.0)]);
        assert_eq!(histogram.count(), 8.0);
        assert_eq!(histogram.quantile(0.5), Some(Quantile::About(0.5 + 1.5 * (4.0 - 2.0) / 6.0)));
    }

    #[test]
    fn quantiles() {
        let histogram = |buckets: &[(f64, f64)]| Histogram { buckets: buckets.to_vec() };
        let check = |buckets: &[(f64, f64)], fraction: f64, wanted: Option<Quantile>| {
            assert_eq!(histogram(buckets).quantile(fraction), wanted, "{buckets:?} {fraction}");
        };
        let infinity = f64::INFINITY;
        check(&[(1.0, 4.0), (infinity, 4.0)], 0.5, Some(Quantile::About(0.5)));
        check(&[(1.0, 0.0), (2.0, 10.0), (infinity, 10.0)], 0.95, Some(Quantile::About(1.95)));
        check(&[(1.0, 1.0), (2.0, 1.0), (infinity, 10.0)], 0.5, Some(Quantile::Above(2.0)));
        check(&[(1.0, 0.0), (2.0, 3.0), (infinity, 3.0)], 0.0, Some(Quantile::About(1.0)));
        check(&[(infinity, 3.0)], 0.5, Some(Quantile::Above(0.0)));
        check(&[(1.0, 0.0), (infinity, 0.0)], 0.5, None);
        check(&[], 0.5, None);
    }

    proptest! {
        /// A quantile is in the bucket with the value of its rank.
        #[test]
        fn a_quantile_is_in_the_right_bucket(
            mut values in prop::collection::vec(0.01_f64..12.0, 1..50),
            fraction in 0.01_f64..1.0,
        ) {
            let bounds = [1.0, 2.0, 5.0, 10.0, f64::INFINITY];
            let at_most = |bound: f64| values.iter().filter(|value| **value <= bound).count() as f64;
            let histogram = Histogram { buckets: bounds.iter().map(|bound| (*bound, at_most(*bound))).collect() };
            let quantile = histogram.quantile(fraction).unwrap();
            values.sort_by(f64::total_cmp);
            let rank = (values.len() as f64 * fraction).ceil() as usize;
            let value = values[rank.clamp(1, values.len()) - 1];
            let upper = bounds.iter().copied().find(|bound| value <= *bound).unwrap();
            let lower = bounds.iter().copied().rev().find(|bound| *bound < value).unwrap_or(0.0);
            match quantile {
                Quantile::About(found) => prop_assert!(lower <= found && found <= upper, "{found} {value}"),
                Quantile::Above(found) => prop_assert!(found == lower && upper.is_infinite(), "{found}"),
            }
        }
    }
}
