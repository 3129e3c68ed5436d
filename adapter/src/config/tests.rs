//! What passes, what is refused, and how it is said.

use std::time::Duration;

use super::*;

const HEAD: &str = "apiVersion: forewarm.dev/v1alpha1\nkind: AdapterConfig\n";

fn read(body: &str) -> Result<Config, Rejected> {
    parse("c.yaml", &format!("{HEAD}{body}"), Options::default())
}

fn complaints(body: &str) -> String {
    read(body).unwrap_err().to_string()
}

const STATIC: &str = "sources: [{name: s, scrape: {targets: ['127.0.0.1:1']}}]\n";

#[test]
fn nothing_but_the_head_gives_the_defaults() {
    let config = read("").unwrap();
    assert!(config.warnings.is_empty(), "{:?}", config.warnings);
    let names: Vec<_> = config.metrics.iter().map(|m| (&*m.name, m.per)).collect();
    assert_eq!(
        names,
        [
            ("gpu_busy_percent", Per::Pods),
            ("gpu_sm_active_percent", Per::Pods),
            ("gpu_memory_used_percent", Per::Pods),
            ("gpu_memory_used_bytes", Per::Pods),
            ("gpu_nvlink_bytes_per_second", Per::Pods),
            ("gpu_power_watts", Per::Pods),
            ("gpu_health_score", Per::Nodes),
            ("gpu_nvlink_errors_per_second", Per::Nodes),
            ("gpu_allocated", Per::Nodes),
            ("gpu_idle", Per::Nodes),
        ]
    );
    assert_eq!(&*config.external[0].name, "gpu_health_reason");
    assert_eq!(config.external[0].reduce, Reduce::None);
    let source = &config.sources[0];
    assert!(source.name_filter);
    assert_eq!(
        (source.interval, source.timeout),
        (Duration::from_secs(2), Duration::from_secs(1))
    );
    assert!(matches!(&source.targets, Targets::Pods { namespace: None, .. }));
    let busy = &config.metrics[0];
    assert_eq!(busy.max_age.exclusive, Duration::from_secs(10));
    assert_eq!(busy.max_age.process, Duration::from_secs(20));
}

#[test]
fn the_example_of_the_design_passes_but_for_later_sources() {
    let body = "
sources:
- name: exporters
  scrape:
    discover: {pods: {namespace: forewarm, selector: app.kubernetes.io/name=forewarm-exporter, port: metrics}}
    scheme: https
    tls: {caFile: /ca.pem, serverName: exporter}
    interval: 2s
    timeout: 1s
- name: autoscaler
  scrape: {discover: {pods: {namespace: forewarm, selector: app.kubernetes.io/name=forewarm-autoscaler, port: admin}}, interval: 5s}
metrics:
- name: gpu_busy_percent
  source: exporters
  series: gpu_pod_busy_ratio
  scale: 100
  per: pods
  pods: ready
  containers: sum
  acrossDevices: mean
  relativeTo: device
  window: {length: 15s, function: mean}
  maxAge: {exclusive: 10s, mig-gpm: 10s, process: 20s}
external:
- name: forewarm_pool_demand_gpus
  source: autoscaler
  series: forewarm_pool_demand_gpus
  reduce: only
  namespaces: [serving, training]
";
    let config = read(body).unwrap();
    assert!(config.sources[0].tls.is_some() && config.sources[0].name_filter);
    assert!(!config.sources[1].name_filter);
    assert_eq!(config.external[0].namespaces, ["serving", "training"]);
}

#[test]
fn all_complaints_come_together_with_path_cause_and_cure() {
    let text = complaints(
        "
sourcs: []
sources:
- name: s
  scrape: {targets: ['127.0.0.1:1'], interval: 2, timout: 1s}
metrics:
- {name: a, source: t, series: x}
- {name: a, source: s, series: x, acrossDevices: average}
- {name: a/b, source: s, series: x}
",
    );
    for expected in [
        "c.yaml: sourcs: unknown field; did you mean sources?",
        "c.yaml: sources[0].scrape.timout: unknown field; did you mean timeout?",
        "c.yaml: sources[0].scrape.interval: 2 has no unit; write 2s if seconds were meant",
        "metrics[1].acrossDevices: 'average' is not known; write one of: mean, max, sum, min",
        "metrics[2].name: 'a/b' cannot stand in a URL",
    ] {
        assert!(text.contains(expected), "{expected}\n{text}");
    }
}

#[test]
fn each_mistake_is_named() {
    let metric = |fields: &str| {
        format!("{STATIC}metrics: [{{name: a, source: s, series: x, {fields}}}]\nexternal: []\n")
    };
    for (body, expected) in [
        (format!("{STATIC}metrics: [{{name: a, source: t, series: x}}]"), "no source is named t; write one of: s"),
        (format!("{STATIC}metrics: [{{name: a, source: s, series: x}}, {{name: a, source: s, series: y}}]"), "metrics[1].name: metric a per pods is defined twice"),
        (metric("maxAge: 1s"), "1s is shorter than the source's interval of 2s"),
        (metric("maxAge: {shared: 5s}"), "metrics[0].maxAge.shared: unknown field"),
        (metric("maxAge: 20"), "20 has no unit"),
        (metric("window: {length: 3s, function: rate}"), "less than two readings"),
        (metric("per: {resource: deployments.apps, via: owner}"), "not in this version"),
        (metric("scale: 0"), "not a usable factor"),
        (metric("ratioOf: {numerator: a, denominator: b}"), "both series and ratioOf"),
        ("sources: [{name: s, scrape: {targets: ['127.0.0.1:1'], interval: 2m}}]".to_owned(), "2m is out of range; write 500ms to 1m; write 2s if seconds were meant"),
        ("sources: [{name: s, scrape: {targets: ['127.0.0.1:1'], timeout: 3s}}]".to_owned(), "3s is longer than the interval of 2s"),
        ("sources: [{name: s, scrape: {targets: ['http://x/metrics']}}]".to_owned(), "is not host:port"),
        ("sources: [{name: s, scrape: {}}]".to_owned(), "names no targets"),
        ("sources: [{name: s, scrape: {discover: {pods: {selector: 'a in', port: p}}}}]".to_owned(), "expected '('"),
        ("sources: [{name: s, prometheus: {url: http://p}}]".to_owned(), "sources[0].prometheus: a Prometheus source is not in this version"),
        ("sources: [{name: s, delegate: {service: a/b}}]".to_owned(), "sources[0].delegate: a delegate source is not in this version"),
        ("sources: [{name: s, scrape: {targets: ['a:1'], scheme: https, tls: {insecureSkipVerify: true}}}]".to_owned(), "verification cannot be turned off"),
        ("sources: [{name: s, scrape: {targets: ['a:1'], scheme: https, tls: {caFile: /ca, certFile: /c}}}]".to_owned(), "only one of certFile and keyFile"),
        ("metrics: [{name: a, source: exporters, series: [x]}]".to_owned(), "metrics[0].series: invalid type: sequence"),
        ("metrics: [{name: a, name: b}]".to_owned(), "duplicate mapping key: name; give each key once"),
        ("kind: Other".to_owned(), "duplicate mapping key: kind; give each key once"),
        ("---\nkind: Other".to_owned(), "one document a file"),
        ("metrics: [{name: a, scale: 1e400}]".to_owned(), "write a finite number"),
    ] {
        let text = complaints(&body);
        assert!(text.contains(expected), "{body}\n{text}");
    }
    let text = parse("c.yaml", "kind: Other\n", Options::default())
        .unwrap_err()
        .to_string();
    assert!(
        text.contains("apiVersion: is missing") && text.contains("kind: 'Other' is not known"),
        "{text}"
    );
    let text = parse("c.yaml", "", Options::default()).unwrap_err().to_string();
    assert!(text.contains("is empty or not a map"), "{text}");
}

#[test]
fn lenient_turns_unknown_fields_into_warnings_and_nothing_else() {
    let lenient = Options {
        lenient: true,
        standalone: false,
    };
    let config = parse("c.yaml", &format!("{HEAD}later: 1\n"), lenient).unwrap();
    assert_eq!(config.warnings[0].path, "later");
    assert!(parse("c.yaml", &format!("{HEAD}later: 1\nmetrics: 2\n"), lenient).is_err());
}

#[test]
fn a_mistyped_series_of_ours_is_a_warning() {
    let config = read("metrics: [{name: a, source: exporters, series: gpu_pod_bussy_ratio}]").unwrap();
    assert_eq!(config.warnings[0].cure, "did you mean gpu_pod_busy_ratio?");
}

#[test]
fn without_a_cluster_nothing_can_be_discovered() {
    let standalone = Options {
        lenient: false,
        standalone: true,
    };
    let text = parse("c.yaml", HEAD, standalone).unwrap_err().to_string();
    assert!(
        text.contains("sources[0].scrape.discover: needs a cluster"),
        "{text}"
    );
    let body = "sources: [{name: exporters, scrape: {targets: [{address: '127.0.0.1:1', node: n}, '127.0.0.1:2']}}]\n";
    let config = parse("c.yaml", &format!("{HEAD}{body}"), standalone).unwrap();
    let Targets::Static(targets) = &config.sources[0].targets else {
        panic!()
    };
    assert_eq!(targets[0].node.as_deref(), Some("n"));
}

#[test]
fn a_bad_reload_leaves_the_old_configuration_and_says_why() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("adapter.yaml");
    let write = |body: &str| std::fs::write(&path, format!("{HEAD}{body}")).unwrap();
    write("external: []\n");
    let metrics = std::sync::Arc::new(crate::metrics::Metrics::default());
    let (mut watcher, handle) = watch::Watcher::new(&path, Options::default(), metrics).unwrap();
    assert!(!watcher.look());
    assert!(handle.current().external.is_empty() && handle.complaint().is_none());

    write("external: []\nmetrcs: []\n");
    assert!(watcher.look());
    assert!(
        handle
            .complaint()
            .unwrap()
            .contains("adapter.yaml: metrcs: unknown field; did you mean metrics?")
    );
    assert_eq!(handle.current().metrics.len(), 10);

    write("metrics: []\n");
    assert!(watcher.look() && handle.complaint().is_none());
    assert!(handle.current().metrics.is_empty() && handle.current().external.len() == 1);

    std::fs::remove_file(&path).unwrap();
    assert!(watcher.look() && !watcher.look());
    assert!(handle.complaint().unwrap().contains("cannot be read"));
    assert_eq!(handle.current().external.len(), 1);
}

#[test]
fn a_check_shows_what_the_file_makes() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.yaml");
    std::fs::write(&path, DEFAULTS).unwrap();
    let (text, ok) = check::check(&path, Options::default(), check::Output::Table);
    assert!(
        ok && text.contains("gpu_memory_used_percent") && text.ends_with("10 metrics, 1 external metrics\n"),
        "{text}"
    );
    std::fs::write(&path, "kind: x").unwrap();
    let (text, ok) = check::check(&path, Options::default(), check::Output::Json);
    let document: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert!(!ok && document["errors"][0]["path"] == "apiVersion", "{text}");
}

#[test]
fn the_manifests_spell_out_the_defaults() {
    let path = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../manifests/base/adapter/config.yaml"
    );
    let written = load(std::path::Path::new(path), Options::default()).unwrap();
    let defaults = read("").unwrap();
    assert!(written.warnings.is_empty(), "{:?}", written.warnings);
    for (left, right) in written.metrics.iter().zip(&defaults.metrics) {
        assert_eq!(left, right);
    }
    assert_eq!(written, defaults);
}
