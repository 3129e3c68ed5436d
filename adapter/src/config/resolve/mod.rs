//! From what is written to what is meant.
//!
//! Invariants: collects every complaint instead of stopping at the first; a returned [`Config`] has passed all
//! checks, those across fields included (timeout against interval, age against interval, ratio against rate).

mod complaints;
mod metrics;
mod sources;

use std::collections::BTreeSet;
use std::sync::Arc;

use super::load::Options;
use super::{Complaint, Config, raw};
use complaints::Complaints;
use metrics::{resolve_external, resolve_metric};
use sources::resolve_sources;

const API_VERSION: &str = "forewarm.dev/v1alpha1";
const KIND: &str = "AdapterConfig";

/// Checks a raw configuration.
pub(super) fn resolve(raw: &raw::AdapterConfig, options: Options) -> Result<Config, Vec<Complaint>> {
    let mut out = Complaints::default();
    for (field, found, expected) in [
        ("apiVersion", &raw.api_version, API_VERSION),
        ("kind", &raw.kind, KIND),
    ] {
        if found.as_deref() != Some(expected) {
            let cause = found.as_ref().map_or_else(
                || "is missing".to_owned(),
                |found| format!("'{found}' is not known"),
            );
            out.error(field, cause, format!("write {expected}"));
        }
    }
    let defaults = defaults();
    let mut sources = resolve_sources(
        raw.sources.as_ref().or(defaults.sources.as_ref()),
        options,
        &mut out,
    );
    let names: Vec<Arc<str>> = sources.iter().map(|source| Arc::clone(&source.name)).collect();
    let broken_sources = !out.errors.is_empty();

    let metrics = raw.metrics.as_ref().or(defaults.metrics.as_ref());
    let intervals = |name: &str| {
        sources
            .iter()
            .find(|source| &*source.name == name)
            .map(|source| source.interval)
    };
    let mut seen = BTreeSet::new();
    let mut resolved_metrics = Vec::new();
    for (i, metric) in metrics.into_iter().flatten().enumerate() {
        let at = format!("metrics[{i}]");
        if let Some(metric) = resolve_metric(metric, &at, &names, broken_sources, &intervals, &mut out) {
            if seen.insert((metric.per, Arc::clone(&metric.name))) {
                resolved_metrics.push(metric);
            } else {
                let cause = format!("metric {} per {} is defined twice", metric.name, metric.per);
                out.error(&format!("{at}.name"), cause, "remove one or rename it".to_owned());
            }
        }
    }
    let mut seen = BTreeSet::new();
    let mut resolved_external = Vec::new();
    for (i, external) in raw
        .external
        .as_ref()
        .or(defaults.external.as_ref())
        .into_iter()
        .flatten()
        .enumerate()
    {
        let at = format!("external[{i}]");
        if let Some(external) = resolve_external(external, &at, &names, broken_sources, &intervals, &mut out)
        {
            if seen.insert(Arc::clone(&external.name)) {
                resolved_external.push(external);
            } else {
                let cause = format!("external metric {} is defined twice", external.name);
                out.error(&format!("{at}.name"), cause, "remove one or rename it".to_owned());
            }
        }
    }
    if !out.errors.is_empty() {
        return Err(out.errors);
    }
    let mut config = Config {
        sources: Vec::new(),
        metrics: resolved_metrics,
        external: resolved_external,
        warnings: out.warnings,
    };
    for (source, written) in sources.iter_mut().zip(
        raw.sources
            .as_ref()
            .or(defaults.sources.as_ref())
            .into_iter()
            .flatten(),
    ) {
        let explicit = written.scrape.as_ref().and_then(|scrape| scrape.name_filter);
        source.name_filter = explicit.unwrap_or_else(|| {
            let families = config.families_of(&source.name);
            !families.is_empty() && families.iter().all(|family| is_exporters(family))
        });
    }
    config.sources = sources;
    Ok(config)
}

/// The file of defaults. It is part of the program and covered by a test.
fn defaults() -> raw::AdapterConfig {
    serde_saphyr::from_str(super::DEFAULTS).unwrap_or(raw::AdapterConfig {
        api_version: None,
        kind: None,
        sources: None,
        metrics: None,
        external: None,
    })
}

/// Whether our exporter exposes this family.
fn is_exporters(family: &str) -> bool {
    use forewarm_signals::{gpu, pod};
    gpu::FAMILIES
        .iter()
        .chain(pod::FAMILIES)
        .any(|known| known.name == family)
}
