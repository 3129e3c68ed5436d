//! From a body to rows with measured-at. Pure.
//!
//! Invariants: a family of ours is as old as its age line says; without one it is left out, because its age
//! is not known. A foreign family without age lines is as old as its explicit timestamp, compared with the
//! target's own `Date` and left out where there is no such header, or as the request where it has no timestamp.
//! No clock of a target is compared with ours.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use forewarm_signals::{MeasuredAt, gpu, label, pod};

use crate::exposition::{Exposition, ParseError, Sample};
use crate::index::Row;
use crate::metrics::Drop;

/// Older than this is a mistake, not an age.
const ABSURD: f64 = 1e6;

/// What to keep of a body.
#[derive(Debug, Clone, Default)]
pub(super) struct Wanted {
    families: HashSet<Arc<str>>,
    /// Whether to ask for these only.
    pub(super) is_filtered: bool,
    pub(super) max_series: usize,
}

impl Wanted {
    pub(super) fn new(families: Vec<Arc<str>>, is_filtered: bool, max_series: usize) -> Self {
        let always = [pod::ALLOCATION.name, pod::READY.name].map(Arc::from);
        Self {
            families: families.into_iter().chain(always).collect(),
            is_filtered,
            max_series,
        }
    }

    /// The query that asks for the needed families and the age lines.
    pub(super) fn query(&self) -> String {
        if !self.is_filtered {
            return String::new();
        }
        let ages = [gpu::SAMPLE_AGE_SECONDS.name, pod::SAMPLE_AGE_SECONDS.name];
        let mut names: Vec<&str> = self.families.iter().map(|name| &**name).chain(ages).collect();
        names.sort_unstable();
        let pairs: Vec<String> = names
            .into_iter()
            .map(|name| format!("name%5B%5D={name}"))
            .collect();
        format!("?{}", pairs.join("&"))
    }
}

/// The moment of a request, and what the target thinks the time is.
#[derive(Debug, Clone, Copy)]
pub(super) struct Moment {
    pub(super) sent: Instant,
    /// How long the answer took to begin.
    pub(super) round_trip: Duration,
    /// The `Date` header, to the second.
    pub(super) date: Option<SystemTime>,
}

/// What a body held.
#[derive(Debug, Default)]
pub(super) struct Read {
    pub(super) rows: Vec<Row>,
    /// How much younger than `measured_at` a reading may be.
    pub(super) round_trip: Duration,
    /// Age of the youngest device reading.
    pub(super) youngest: Option<Duration>,
    pub(super) dropped: Vec<(Drop, usize)>,
}

/// Why a body is not taken.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Refused {
    #[error("{0}")]
    Format(#[from] ParseError),
    #[error("more than {0} samples")]
    TooManySeries(usize),
}

/// Whom an age line is about: a device and group, or a pod and source.
type AgeKey = (Box<str>, Box<str>);

/// Reads a body.
pub(super) fn read(
    format: &dyn Exposition,
    body: &[u8],
    wanted: &Wanted,
    moment: Moment,
) -> Result<Read, Refused> {
    let mut kept: Vec<(Row, Option<i64>)> = Vec::new();
    let mut device_ages: HashMap<AgeKey, f64> = HashMap::new();
    let mut pod_ages: HashMap<AgeKey, f64> = HashMap::new();
    let mut current: (&str, Option<&Arc<str>>) = ("", None);
    let parsed = format.parse(body, &mut |sample| {
        if current.0 != sample.name {
            current = (sample.name, wanted.families.get(sample.name));
        }
        if let Some(family) = current.1 {
            if kept.len() <= wanted.max_series {
                kept.push((row(family, &sample, moment.sent), sample.timestamp_ms));
            }
        } else if sample.name == gpu::SAMPLE_AGE_SECONDS.name {
            age_line(&mut device_ages, &sample, label::UUID, label::GROUP);
        } else if sample.name == pod::SAMPLE_AGE_SECONDS.name {
            age_line(&mut pod_ages, &sample, label::POD_UID, label::SOURCE);
        }
    })?;
    if parsed.samples > wanted.max_series {
        return Err(Refused::TooManySeries(wanted.max_series));
    }
    let mut read = Read {
        rows: Vec::with_capacity(kept.len()),
        round_trip: moment.round_trip,
        youngest: device_ages
            .values()
            .copied()
            .filter(|age| (0.0..ABSURD).contains(age))
            .reduce(f64::min)
            .map(Duration::from_secs_f64),
        dropped: Vec::new(),
    };
    let mut counts: HashMap<Drop, usize> = HashMap::new();
    for (mut row, timestamp) in kept {
        let known = forewarm_signals::by_name(&row.family).map(|family| family.measured);
        let age = match known {
            Some(MeasuredAt::Now) => Ok(Duration::ZERO),
            Some(MeasuredAt::Device(group)) => {
                looked_up(&device_ages, row.label(label::UUID), Some(group.as_str()))
            }
            Some(MeasuredAt::Pod) => {
                looked_up(&pod_ages, row.label(label::POD_UID), row.label(label::SOURCE))
            }
            None => foreign_age(timestamp, moment),
        };
        let measured_at = age.and_then(|age| moment.sent.checked_sub(age).ok_or(Drop::BadAge));
        match measured_at {
            Ok(measured_at) => {
                row.measured_at = measured_at;
                read.rows.push(row);
            }
            Err(reason) => *counts.entry(reason).or_default() += 1,
        }
    }
    read.dropped = counts.into_iter().collect();
    Ok(read)
}

fn row(family: &Arc<str>, sample: &Sample<'_, '_>, sent: Instant) -> Row {
    Row {
        family: Arc::clone(family),
        labels: sample
            .labels
            .iter()
            .map(|label| (label.key.into(), label.value.as_ref().into()))
            .collect(),
        value: sample.value,
        measured_at: sent,
    }
}

fn age_line(ages: &mut HashMap<AgeKey, f64>, sample: &Sample<'_, '_>, whose: &str, which: &str) {
    if let (Some(whose), Some(which)) = (sample.label(whose), sample.label(which)) {
        ages.insert((whose.into(), which.into()), sample.value);
    }
}

fn looked_up(
    ages: &HashMap<AgeKey, f64>,
    whose: Option<&str>,
    which: Option<&str>,
) -> Result<Duration, Drop> {
    let (Some(whose), Some(which)) = (whose, which) else {
        return Err(Drop::NoIdentity);
    };
    match ages.get(&(whose.into(), which.into())) {
        None => Err(Drop::NoAge),
        Some(age) if (0.0..ABSURD).contains(age) => Ok(Duration::from_secs_f64(*age)),
        Some(_) => Err(Drop::BadAge),
    }
}

fn foreign_age(timestamp_ms: Option<i64>, moment: Moment) -> Result<Duration, Drop> {
    let Some(millis) = timestamp_ms else {
        return Ok(Duration::ZERO);
    };
    let at = u64::try_from(millis)
        .ok()
        .and_then(|millis| SystemTime::UNIX_EPOCH.checked_add(Duration::from_millis(millis)))
        .ok_or(Drop::BadAge)?;
    // Their clock says nothing about ours: without a date of the same clock the age is not known.
    let date = moment.date.ok_or(Drop::NoAge)?;
    // `Date` is cut to the second: the true time is up to a second later, and so is the age.
    (date + Duration::from_secs(1))
        .duration_since(at)
        .map_err(|_| Drop::BadAge)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::exposition::PrometheusText;

    fn moment() -> Moment {
        Moment {
            sent: Instant::now() + Duration::from_secs(100_000),
            round_trip: Duration::from_millis(5),
            date: None,
        }
    }

    fn wanted(families: &[&str]) -> Wanted {
        Wanted::new(
            families.iter().map(|family| Arc::from(*family)).collect(),
            true,
            100,
        )
    }

    fn ages(body: &str, families: &[&str], moment: Moment) -> (Vec<f64>, Vec<(Drop, usize)>) {
        let read = read(&PrometheusText, body.as_bytes(), &wanted(families), moment).unwrap();
        let ages = read
            .rows
            .iter()
            .map(|row| (moment.sent - row.measured_at).as_secs_f64())
            .collect();
        (ages, read.dropped)
    }

    const POD: &str = "gpu_pod_busy_ratio{pod_uid=\"u\",source=\"exclusive\"} 0.5 1\ngpu_pod_sample_age_seconds{pod_uid=\"u\",source=\"exclusive\"} 1.25\n";

    #[test]
    fn age_lines_decide_and_explicit_timestamps_do_not() {
        assert_eq!(ages(POD, &["gpu_pod_busy_ratio"], moment()).0, [1.25]);
        let device = "gpu_sample_age_seconds{uuid=\"g\",group=\"memory\"} 0.5\ngpu_sample_age_seconds{uuid=\"g\",group=\"nvlink\"} 3\ngpu_nvlink_bytes_total{uuid=\"g\",direction=\"rx\"} 4\n";
        let read = read(
            &PrometheusText,
            device.as_bytes(),
            &wanted(&["gpu_nvlink_bytes_total"]),
            moment(),
        )
        .unwrap();
        assert_eq!(read.youngest, Some(Duration::from_millis(500)));
        assert_eq!(ages(device, &["gpu_nvlink_bytes_total"], moment()).0, [3.0]);
    }

    #[test]
    fn a_family_of_ours_without_a_usable_age_is_left_out() {
        let body = "gpu_pod_busy_ratio{pod_uid=\"u\",source=\"exclusive\"} 0.5\n";
        assert_eq!(
            ages(body, &["gpu_pod_busy_ratio"], moment()).1,
            [(Drop::NoAge, 1)]
        );
        for age in ["-1", "NaN", "+Inf", "1e9"] {
            let body = POD.replace("1.25", age);
            assert_eq!(
                ages(&body, &["gpu_pod_busy_ratio"], moment()).1,
                [(Drop::BadAge, 1)],
                "{age}"
            );
        }
    }

    #[test]
    fn foreign_timestamps_are_judged_by_the_targets_own_clock() {
        let wall = 1_700_000_000_u64;
        for skew in [-600_i64, 0, 600] {
            let theirs = wall.saturating_add_signed(skew);
            let body = format!("dcgm_x{{}} 1 {}\n", theirs * 1000 - 3000);
            let date = SystemTime::UNIX_EPOCH + Duration::from_secs(theirs);
            let skewed = Moment {
                date: Some(date),
                ..moment()
            };
            assert_eq!(ages(&body, &["dcgm_x"], skewed).0, [4.0], "{skew}");
        }
        assert_eq!(ages("dcgm_x 1\n", &["dcgm_x"], moment()).0, [0.0]);
        // Without a date of its clock a timestamp says nothing, whichever way the clocks differ.
        for theirs in [wall - 5, wall + 5] {
            let body = format!("dcgm_x 1 {}\n", theirs * 1000);
            assert_eq!(ages(&body, &["dcgm_x"], moment()).1, [(Drop::NoAge, 1)]);
        }
    }

    #[test]
    fn more_samples_than_allowed_refuse_the_body() {
        use std::fmt::Write as _;
        let mut body = String::new();
        for i in 0..101 {
            writeln!(body, "other{{i=\"{i}\"}} 1").unwrap();
        }
        let refused = read(&PrometheusText, body.as_bytes(), &wanted(&[]), moment()).unwrap_err();
        assert_eq!(refused, Refused::TooManySeries(100));
    }

    #[test]
    fn the_filter_names_families_and_age_lines() {
        let query = wanted(&["gpu_pod_busy_ratio"]).query();
        for name in [
            "gpu_pod_busy_ratio",
            "gpu_pod_allocation",
            "gpu_pod_ready",
            "gpu_sample_age_seconds",
            "gpu_pod_sample_age_seconds",
        ] {
            assert!(query.contains(&format!("name%5B%5D={name}")), "{query}");
        }
        assert_eq!(Wanted::new(vec![], false, 1).query(), "");
    }
}
