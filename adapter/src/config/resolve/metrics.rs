//! Custom and external metrics: series, objects, windows and ages.

use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::Duration;

use super::{Complaints, is_exporters};
use crate::config::load::nearest;
use crate::config::scalar::shown;
use crate::config::{
    Across, External, Function, MaxAge, Metric, Per, PodFilter, Reduce, RelativeTo, Series, Window, raw,
};

const WINDOW: RangeInclusive<Duration> = Duration::from_secs(1)..=Duration::from_secs(600);
const MAX_AGE: RangeInclusive<Duration> = Duration::from_secs(1)..=Duration::from_secs(600);

/// The interval of a source, by its name.
pub(super) type Intervals<'a> = dyn Fn(&str) -> Option<Duration> + 'a;

fn resolve_source(
    written: Option<&String>,
    at: &str,
    names: &[Arc<str>],
    broken: bool,
    out: &mut Complaints,
) -> Option<Arc<str>> {
    let at = format!("{at}.source");
    let known: Vec<&str> = names.iter().map(|name| &**name).collect();
    let written = out.required(&at, written, &format!("one of: {}", known.join(", ")))?;
    if let Some(name) = names.iter().find(|name| ***name == written) {
        return Some(Arc::clone(name));
    }
    // A source that failed its own checks is not also unknown.
    if !broken {
        out.error(
            &at,
            format!("no source is named {written}"),
            format!("write one of: {}", known.join(", ")),
        );
    }
    None
}

fn resolve_name(written: Option<&String>, at: &str, out: &mut Complaints) -> Option<Arc<str>> {
    let at = format!("{at}.name");
    let name = out.required(&at, written, "the metric's name")?;
    let legal = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.' | ':');
    if name.chars().all(legal) && name.len() <= 253 {
        return Some(Arc::from(name));
    }
    let cause = format!("'{name}' cannot stand in a URL of the metrics API");
    out.error(&at, cause, "use letters, digits, '_', '-', '.' and ':'");
    None
}

fn resolve_family(written: Option<&String>, at: &str, out: &mut Complaints) -> Option<Arc<str>> {
    let family = out.required(at, written, "the name of a series")?;
    if family.starts_with("gpu_") && !is_exporters(&family) {
        let known = forewarm_signals::all().map(|family| family.name);
        let cure = nearest(&family, known).map_or_else(String::new, |name| format!("did you mean {name}?"));
        out.warn(
            at,
            format!("series {family} is none of forewarm-exporter's"),
            cure,
        );
    }
    Some(Arc::from(family))
}

fn resolve_max_age(
    written: Option<&raw::MaxAge>,
    at: &str,
    interval: Option<Duration>,
    out: &mut Complaints,
) -> MaxAge {
    let ten = Duration::from_secs(10);
    let default = MaxAge {
        exclusive: ten,
        mig_gpm: ten,
        process: Duration::from_secs(20),
    };
    let at = format!("{at}.maxAge");
    let resolved = match written {
        None => default,
        Some(raw::MaxAge::All(scalar)) => {
            let all = out.duration(&at, Some(scalar), ten, &MAX_AGE);
            MaxAge {
                exclusive: all,
                mig_gpm: all,
                process: all,
            }
        }
        Some(raw::MaxAge::BySource(map)) => {
            let mut resolved = default;
            for (source, scalar) in map {
                let at = format!("{at}.{source}");
                let field = match source.as_str() {
                    "exclusive" => &mut resolved.exclusive,
                    "mig-gpm" => &mut resolved.mig_gpm,
                    "process" => &mut resolved.process,
                    _ => {
                        out.error(&at, "unknown field", "write exclusive, mig-gpm or process");
                        continue;
                    }
                };
                *field = out.duration(&at, Some(scalar), *field, &MAX_AGE);
            }
            resolved
        }
    };
    let shortest = resolved.exclusive.min(resolved.mig_gpm).min(resolved.process);
    if let Some(interval) = interval
        && shortest < interval
    {
        let cause = format!(
            "{} is shorter than the source's interval of {}: values would blink",
            shown(shortest),
            shown(interval)
        );
        out.error(&at, cause, format!("write at least {}", shown(interval * 2)));
    }
    resolved
}

pub(super) fn resolve_metric(
    written: &raw::Metric,
    at: &str,
    names: &[Arc<str>],
    broken: bool,
    intervals: &Intervals<'_>,
    out: &mut Complaints,
) -> Option<Metric> {
    let before = out.errors.len();
    let name = resolve_name(written.name.as_ref(), at, out);
    let source = resolve_source(written.source.as_ref(), at, names, broken, out);
    let series = match (&written.series, &written.ratio_of) {
        (Some(_), None) => {
            resolve_family(written.series.as_ref(), &format!("{at}.series"), out).map(Series::Direct)
        }
        (None, Some(ratio)) => {
            let numerator = resolve_family(ratio.numerator.as_ref(), &format!("{at}.ratioOf.numerator"), out);
            let denominator = resolve_family(
                ratio.denominator.as_ref(),
                &format!("{at}.ratioOf.denominator"),
                out,
            );
            numerator
                .zip(denominator)
                .map(|(numerator, denominator)| Series::Ratio {
                    numerator,
                    denominator,
                })
        }
        (None, None) => {
            out.error(
                at,
                "does not say which series it is made of",
                "add series or ratioOf",
            );
            None
        }
        (Some(_), Some(_)) => {
            out.error(at, "has both series and ratioOf", "keep one");
            None
        }
    };
    let per = match &written.per {
        None => Per::Pods,
        Some(raw::Per::Kind(kind)) => out.word(
            &format!("{at}.per"),
            Some(kind),
            Per::Pods,
            &[
                ("pods", Per::Pods),
                ("nodes", Per::Nodes),
                ("namespaces", Per::Namespaces),
            ],
        ),
        Some(raw::Per::Owner(_)) => {
            out.error(
                &format!("{at}.per"),
                "metrics of owners are not in this version",
                "write pods, nodes or namespaces",
            );
            Per::Pods
        }
    };
    out.word(
        &format!("{at}.containers"),
        written.containers.as_deref(),
        (),
        &[("sum", ())],
    );
    let interval = source.as_deref().and_then(intervals);
    let window = written
        .window
        .as_ref()
        .map(|window| resolve_window(window, at, out));
    check_window(window, interval, series.as_ref(), at, out);
    let metric = Metric {
        sum: written.sum.clone().unwrap_or_default(),
        scale: out.factor(&format!("{at}.scale"), written.scale.as_ref()),
        per,
        pods: out.word(
            &format!("{at}.pods"),
            written.pods.as_deref(),
            PodFilter::Ready,
            &[("ready", PodFilter::Ready), ("all", PodFilter::All)],
        ),
        across_devices: out.word(
            &format!("{at}.acrossDevices"),
            written.across_devices.as_deref(),
            Across::Mean,
            &[
                ("mean", Across::Mean),
                ("max", Across::Max),
                ("sum", Across::Sum),
                ("min", Across::Min),
            ],
        ),
        relative_to: out.word(
            &format!("{at}.relativeTo"),
            written.relative_to.as_deref(),
            RelativeTo::Device,
            &[("device", RelativeTo::Device), ("share", RelativeTo::Share)],
        ),
        window,
        max_age: resolve_max_age(written.max_age.as_ref(), at, interval, out),
        name: name?,
        source: source?,
        series: series?,
    };
    (out.errors.len() == before).then_some(metric)
}

fn resolve_window(written: &raw::Window, at: &str, out: &mut Complaints) -> Window {
    let length_at = format!("{at}.window.length");
    let fallback = Duration::from_secs(15);
    if written.length.is_none() {
        out.error(&length_at, "is missing", "write a time such as 15s");
    }
    Window {
        length: out.duration(&length_at, written.length.as_ref(), fallback, &WINDOW),
        function: out.word(
            &format!("{at}.window.function"),
            written.function.as_deref(),
            Function::Mean,
            &[
                ("mean", Function::Mean),
                ("max", Function::Max),
                ("min", Function::Min),
                ("rate", Function::Rate),
            ],
        ),
    }
}

/// A window must hold at least two readings, and rates are for counters.
fn check_window(
    window: Option<Window>,
    interval: Option<Duration>,
    series: Option<&Series>,
    at: &str,
    out: &mut Complaints,
) {
    let counters = series.is_some_and(|series| series.families().all(|family| family.ends_with("_total")));
    match window {
        Some(Window {
            function: Function::Rate,
            ..
        }) => {
            if matches!(series, Some(Series::Ratio { .. })) {
                out.error(
                    &format!("{at}.window.function"),
                    "a ratio has no rate",
                    "use mean, or series instead of ratioOf",
                );
            } else if series.is_some() && !counters {
                out.warn(
                    &format!("{at}.window.function"),
                    "rate of a series that is no counter (_total)",
                    "use mean",
                );
            }
        }
        _ if counters && series.is_some() => {
            out.warn(
                &format!("{at}.series"),
                "a counter only ever grows",
                "add window: {length: 60s, function: rate}",
            );
        }
        _ => {}
    }
    if let (Some(window), Some(interval)) = (window, interval)
        && window.length < interval * 2
        && window.function == Function::Rate
    {
        let cause = format!(
            "{} holds less than two readings at an interval of {}",
            shown(window.length),
            shown(interval)
        );
        out.error(
            &format!("{at}.window.length"),
            cause,
            format!("write at least {}", shown(interval * 2)),
        );
    }
}

pub(super) fn resolve_external(
    written: &raw::External,
    at: &str,
    names: &[Arc<str>],
    broken: bool,
    intervals: &Intervals<'_>,
    out: &mut Complaints,
) -> Option<External> {
    let before = out.errors.len();
    let name = resolve_name(written.name.as_ref(), at, out);
    let source = resolve_source(written.source.as_ref(), at, names, broken, out);
    let series = resolve_family(written.series.as_ref(), &format!("{at}.series"), out);
    let interval = source.as_deref().and_then(intervals);
    let max_age = written.max_age.clone().map(raw::MaxAge::All);
    let external = External {
        scale: out.factor(&format!("{at}.scale"), written.scale.as_ref()),
        reduce: out.word(
            &format!("{at}.reduce"),
            written.reduce.as_deref(),
            Reduce::Only,
            &[
                ("none", Reduce::None),
                ("only", Reduce::Only),
                ("max", Reduce::Max),
                ("sum", Reduce::Sum),
            ],
        ),
        namespaces: written.namespaces.clone().unwrap_or_default(),
        namespace_label: written.namespace_label.clone(),
        max_age: resolve_max_age(max_age.as_ref(), at, interval, out).exclusive,
        name: name?,
        source: source?,
        series: series?,
    };
    (out.errors.len() == before).then_some(external)
}
