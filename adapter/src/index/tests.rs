//! Sequences of bodies and pod changes, and what is published after them.

mod targets;

use std::collections::{BTreeMap, HashMap};

use proptest::prelude::*;

use super::*;
use crate::config::{Options, parse};
use crate::exposition::{Exposition as _, PrometheusText};

/// A writer with the metrics of `config` on source `s`, and a clock.
struct Rig {
    writer: Writer,
    metrics: Arc<crate::metrics::Metrics>,
    now: Instant,
}

fn config(metrics: &str) -> Arc<Config> {
    let sources = if metrics.starts_with("sources:") {
        ""
    } else {
        "sources: [{name: s, scrape: {targets: ['a:1']}}]\n"
    };
    let text = format!("apiVersion: forewarm.dev/v1alpha1\nkind: AdapterConfig\n{sources}{metrics}");
    Arc::new(parse("test", &text, Options::default()).unwrap())
}

fn rig(metrics: &str, mode: PodMode) -> Rig {
    let own = Arc::new(crate::metrics::Metrics::default());
    Rig {
        writer: Writer::new(&config(metrics), mode, Arc::clone(&own)),
        metrics: own,
        // Far from the clock's zero, so that ages can be taken off.
        now: Instant::now() + Duration::from_secs(100_000),
    }
}

const BUSY: &str =
    "metrics: [{name: busy, source: s, series: gpu_pod_busy_ratio, scale: 100}]\nexternal: []\n";

fn pod(uid: &str, name: &str, node: &str, ready: bool) -> Pod {
    Pod {
        uid: Arc::from(uid),
        namespace: Arc::from("ns"),
        name: Arc::from(name),
        labels: BTreeMap::from([("app".to_owned(), "llm".to_owned())]),
        node: Some(Arc::from(node)),
        ready: Some(ready),
        ready_since: None,
    }
}

fn busy(uid: &str, name: &str, device: &str, value: f64) -> String {
    format!(
        "gpu_pod_busy_ratio{{namespace=\"ns\",pod=\"{name}\",container=\"c\",pod_uid=\"{uid}\",uuid=\"{device}\",source=\"exclusive\"}} {value}\n"
    )
}

fn holds(uid: &str, name: &str, device: &str) -> String {
    format!(
        "gpu_pod_allocation{{namespace=\"ns\",pod=\"{name}\",container=\"c\",pod_uid=\"{uid}\",uuid=\"{device}\",sharing=\"none\"}} 1\n"
    )
}

impl Rig {
    fn pods(&mut self, pods: Vec<Pod>) {
        self.writer.pod_change(PodChange::Replace(pods), self.now);
    }

    /// A body from `target` on `node`, read now.
    fn body(&mut self, target: &str, node: Option<&str>, text: &str) {
        self.body_of("s", target, node, text);
    }

    /// A body from a target of `source`, read now.
    fn body_of(&mut self, source: &str, target: &str, node: Option<&str>, text: &str) {
        let mut rows = Vec::new();
        PrometheusText
            .parse(text.as_bytes(), &mut |sample| {
                rows.push(Row {
                    family: Arc::from(sample.name),
                    labels: sample
                        .labels
                        .iter()
                        .map(|l| (l.key.into(), l.value.as_ref().into()))
                        .collect(),
                    value: sample.value,
                    measured_at: self.now,
                });
            })
            .unwrap();
        self.writer.batch(&Batch {
            target: TargetId {
                source: Arc::from(source),
                name: Arc::from(target),
            },
            node: node.map(Arc::from),
            at: self.now,
            round_trip: Duration::from_millis(5),
            rows,
        });
    }

    fn after(&mut self, seconds: f64) {
        self.now += Duration::from_secs_f64(seconds);
    }

    fn entry(&self, uid: &str) -> Option<Entry> {
        self.writer.state().custom[0].pods.get("ns")?.get(uid).cloned()
    }

    /// The served text, or the reason.
    fn shown(&self, uid: &str) -> String {
        shown(self.entry(uid))
    }

    fn node(&self, name: &str) -> String {
        shown(self.writer.state().custom[0].nodes.get(name).cloned())
    }

    fn dropped(&self, reason: &str) -> u64 {
        let mut registry = prometheus_client::registry::Registry::default();
        self.metrics.register(&mut registry);
        let text = forewarm_runtime::metrics::text(&registry);
        let start = format!("forewarm_adapter_samples_dropped_total{{reason=\"{reason}\"}} ");
        text.lines()
            .find_map(|line| line.strip_prefix(&start))
            .map_or(0, |count| count.parse().unwrap())
    }
}

fn shown(entry: Option<Entry>) -> String {
    match entry {
        None => "nothing".to_owned(),
        Some(Entry::Value(value)) => value.quantity.to_string(),
        Some(Entry::Withheld(text)) => format!("withheld: {text}"),
        Some(Entry::Absent(text)) => format!("absent: {text}"),
    }
}

#[test]
fn a_ready_pod_gets_the_mean_of_its_devices() {
    let mut rig = rig(BUSY, PodMode::Watched);
    rig.pods(vec![pod("u1", "p1", "n1", true)]);
    let body = busy("u1", "p1", "g0", 0.5)
        + &busy("u1", "p1", "g1", 0.7)
        + &holds("u1", "p1", "g0")
        + &holds("u1", "p1", "g1");
    rig.body("t1", Some("n1"), &body);
    assert_eq!(rig.shown("u1"), "60");
}

#[test]
fn a_device_without_a_reading_leaves_no_value_rather_than_a_partial_one() {
    let mut rig = rig(BUSY, PodMode::Watched);
    rig.pods(vec![pod("u1", "p1", "n1", true)]);
    let both = holds("u1", "p1", "g0") + &holds("u1", "p1", "g1");
    rig.body("t1", Some("n1"), &(busy("u1", "p1", "g0", 0.5) + &both));
    assert_eq!(
        rig.shown("u1"),
        "absent: has no reading of gpu_pod_busy_ratio for device g1"
    );
    // A device that is held no longer stops counting, though its readings are still known.
    rig.after(2.0);
    rig.body(
        "t1",
        Some("n1"),
        &(busy("u1", "p1", "g0", 0.5) + &busy("u1", "p1", "g1", 0.9) + &both),
    );
    assert_eq!(rig.shown("u1"), "70");
    rig.after(2.0);
    rig.body(
        "t1",
        Some("n1"),
        &(busy("u1", "p1", "g0", 0.5) + &holds("u1", "p1", "g0")),
    );
    assert_eq!(rig.shown("u1"), "50");
}

#[test]
fn a_value_is_as_old_as_its_oldest_device() {
    let mut rig = rig(BUSY, PodMode::Watched);
    rig.pods(vec![pod("u1", "p1", "n1", true)]);
    let both = holds("u1", "p1", "g0") + &holds("u1", "p1", "g1");
    rig.body(
        "t1",
        Some("n1"),
        &(busy("u1", "p1", "g0", 0.5) + &busy("u1", "p1", "g1", 0.5) + &both),
    );
    let first = rig.now;
    rig.after(4.0);
    rig.body("t1", Some("n1"), &(busy("u1", "p1", "g0", 0.9) + &both));
    let Some(Entry::Value(value)) = rig.entry("u1") else {
        panic!()
    };
    assert_eq!(value.measured_at, first);
}

#[test]
fn a_pod_that_still_loads_is_withheld_and_its_zeros_never_count() {
    let mean = "metrics: [{name: busy, source: s, series: gpu_pod_busy_ratio, scale: 100, window: {length: 15s}}]\nexternal: []\n";
    let mut rig = rig(mean, PodMode::Watched);
    rig.pods(vec![pod("u1", "p1", "n1", false)]);
    for _ in 0..3 {
        rig.body("t1", Some("n1"), &busy("u1", "p1", "g0", 0.0));
        rig.after(2.0);
    }
    assert!(
        rig.shown("u1").starts_with("withheld: is not ready"),
        "{}",
        rig.shown("u1")
    );
    rig.writer
        .pod_change(PodChange::Apply(pod("u1", "p1", "n1", true)), rig.now);
    assert!(
        rig.shown("u1").contains("became ready just now"),
        "{}",
        rig.shown("u1")
    );
    rig.after(1.0);
    rig.body("t1", Some("n1"), &busy("u1", "p1", "g0", 0.8));
    assert_eq!(rig.shown("u1"), "80");
    rig.writer
        .pod_change(PodChange::Apply(pod("u1", "p1", "n1", false)), rig.now);
    assert!(rig.shown("u1").starts_with("withheld"));
}

#[test]
fn the_pods_node_decides_between_two_claims() {
    let mut rig = rig(BUSY, PodMode::Watched);
    rig.pods(vec![pod("u1", "p1", "n1", true)]);
    rig.body("right", Some("n1"), &busy("u1", "p1", "g0", 0.5));
    rig.body("liar", Some("n2"), &busy("u1", "p1", "g9", 0.9));
    assert_eq!(rig.shown("u1"), "50");
    assert_eq!(rig.dropped("conflict"), 1);
    // A second exporter on the same node, as in a rolling update, tells the truth too.
    rig.after(1.0);
    rig.body("right-new", Some("n1"), &busy("u1", "p1", "g0", 0.6));
    assert_eq!(rig.shown("u1"), "60");
    assert_eq!(rig.dropped("conflict"), 1);
}

#[test]
fn without_a_node_two_claims_leave_no_value_until_one_ends() {
    let mut rig = rig(BUSY, PodMode::Reported);
    let body = |value| {
        format!(
            "gpu_pod_ready{{namespace=\"ns\",pod=\"p1\",pod_uid=\"u1\"}} 1\n{}{}",
            holds("u1", "p1", "g0"),
            busy("u1", "p1", "g0", value)
        )
    };
    rig.body("t1", None, &body(0.5));
    assert_eq!(rig.shown("u1"), "50");
    rig.after(0.5);
    rig.body("t2", None, &body(0.9));
    rig.after(0.5);
    rig.body("t1", None, &body(0.5));
    assert_eq!(
        rig.shown("u1"),
        "absent: is claimed by two targets, t1 and t2, and its node is not known"
    );
    assert!(rig.dropped("conflict") >= 1);
    for _ in 0..6 {
        rig.after(2.0);
        rig.body("t1", None, &body(0.5));
    }
    assert_eq!(rig.shown("u1"), "50");
}

#[test]
fn a_name_that_is_used_again_inherits_nothing() {
    let mut rig = rig(BUSY, PodMode::Watched);
    rig.pods(vec![pod("u1", "p1", "n1", true)]);
    rig.body("t1", Some("n1"), &busy("u1", "p1", "g0", 0.5));
    rig.writer
        .pod_change(PodChange::Apply(pod("u2", "p1", "n1", true)), rig.now);
    assert_eq!(
        (rig.shown("u1"), rig.shown("u2")),
        ("nothing".to_owned(), "nothing".to_owned())
    );
    // The exporter still speaks of the old one.
    rig.body("t1", Some("n1"), &busy("u1", "p1", "g0", 0.5));
    assert_eq!(rig.shown("u2"), "nothing");
    assert_eq!(rig.dropped("unknown-pod"), 1);
    // The late deletion of the old one does not touch the new one.
    rig.body("t1", Some("n1"), &busy("u2", "p1", "g0", 0.4));
    rig.writer.pod_change(PodChange::Remove(Arc::from("u1")), rig.now);
    assert_eq!(rig.shown("u2"), "40");
    assert!(rig.writer.state().pods["ns"].contains_key("p1"));
}

#[test]
fn a_uid_under_another_name_is_refused() {
    let mut rig = rig(BUSY, PodMode::Watched);
    rig.pods(vec![pod("u1", "p1", "n1", true)]);
    rig.body("t1", Some("n1"), &busy("u1", "other", "g0", 0.5));
    assert_eq!(
        (rig.shown("u1"), rig.dropped("wrong-pod")),
        ("nothing".to_owned(), 1)
    );
}

#[test]
fn foreign_exporters_are_matched_by_name() {
    let mut rig = rig(
        BUSY.replace("gpu_pod_busy_ratio", "DCGM_FI_DEV_GPU_UTIL")
            .as_str(),
        PodMode::Watched,
    );
    rig.pods(vec![pod("u1", "p1", "n1", true)]);
    rig.body("t1", Some("n1"), "DCGM_FI_DEV_GPU_UTIL{UUID=\"g0\",exported_namespace=\"ns\",exported_pod=\"p1\",namespace=\"monitoring\",pod=\"dcgm\"} 0.5\n");
    // Both spellings are there: the scraper's own labels win over renamed ones only where they are ours.
    assert_eq!(rig.dropped("unknown-pod"), 1);
    rig.body(
        "t1",
        Some("n1"),
        "DCGM_FI_DEV_GPU_UTIL{UUID=\"g0\",namespace=\"ns\",pod=\"p1\"} 0.5\n",
    );
    assert_eq!(rig.shown("u1"), "50");
    rig.body("t1", Some("n1"), "DCGM_FI_DEV_GPU_UTIL{UUID=\"g0\"} 0.5\n");
    assert_eq!(rig.dropped("no-identity"), 1);
}

#[test]
fn what_is_no_number_is_dropped_and_spoils_only_its_sum() {
    let sum = "metrics: [{name: nv, source: s, series: gpu_pod_nvlink_bytes_per_second, sum: [direction], acrossDevices: sum}]\nexternal: []\n";
    let mut rig = rig(sum, PodMode::Watched);
    rig.pods(vec![pod("u1", "p1", "n1", true), pod("u2", "p2", "n1", true)]);
    let row = |uid: &str, direction: &str, value: &str| {
        format!(
            "gpu_pod_nvlink_bytes_per_second{{pod_uid=\"{uid}\",uuid=\"g-{uid}\",container=\"c\",source=\"exclusive\",direction=\"{direction}\"}} {value}\n"
        )
    };
    rig.body(
        "t1",
        Some("n1"),
        &(row("u1", "rx", "3") + &row("u1", "tx", "4") + &row("u2", "rx", "1") + &row("u2", "tx", "1")),
    );
    assert_eq!(
        (rig.shown("u1"), rig.shown("u2")),
        ("7".to_owned(), "2".to_owned())
    );
    rig.after(2.0);
    rig.body(
        "t1",
        Some("n1"),
        &(row("u1", "rx", "NaN") + &row("u1", "tx", "40") + &row("u2", "rx", "5") + &row("u2", "tx", "5")),
    );
    // The old reading stays and ages; a sum of one direction is never served.
    assert_eq!(
        (rig.shown("u1"), rig.shown("u2")),
        ("7".to_owned(), "10".to_owned())
    );
    assert_eq!(rig.dropped("not-finite"), 1);
}

#[test]
fn rows_that_differ_in_an_unnamed_label_are_not_guessed_at() {
    let mut rig = rig(
        "metrics: [{name: nv, source: s, series: gpu_pod_nvlink_bytes_per_second}]\nexternal: []\n",
        PodMode::Watched,
    );
    rig.pods(vec![pod("u1", "p1", "n1", true)]);
    let row = |direction: &str| {
        format!("gpu_pod_nvlink_bytes_per_second{{pod_uid=\"u1\",uuid=\"g\",direction=\"{direction}\"}} 1\n")
    };
    rig.body("t1", Some("n1"), &(row("rx") + &row("tx")));
    assert!(
        rig.shown("u1").contains("name the labels that differ in sum"),
        "{}",
        rig.shown("u1")
    );
    rig.after(2.0);
    rig.body("t1", Some("n1"), &(row("rx") + &row("rx")));
    assert!(rig.shown("u1").contains("twice in one body"));
    assert_eq!(rig.dropped("duplicate"), 2);
}

#[test]
fn a_ratio_is_taken_container_by_container() {
    let ratio = "metrics: [{name: used, source: s, ratioOf: {numerator: gpu_pod_memory_used_bytes, denominator: gpu_pod_memory_total_bytes}, scale: 100}]\nexternal: []\n";
    let mut rig = rig(ratio, PodMode::Watched);
    rig.pods(vec![pod("u1", "p1", "n1", true)]);
    let row = |family: &str, container: &str, value: f64| {
        format!(
            "gpu_pod_memory_{family}_bytes{{pod_uid=\"u1\",uuid=\"g\",container=\"{container}\",source=\"exclusive\"}} {value}\n"
        )
    };
    let body = row("used", "a", 20.0)
        + &row("used", "b", 30.0)
        + &row("total", "a", 80.0)
        + &row("total", "b", 80.0);
    rig.body("t1", Some("n1"), &body);
    assert_eq!(rig.shown("u1"), "62500m");
    rig.after(2.0);
    rig.body("t1", Some("n1"), &body.replace("} 80", "} 0"));
    assert_eq!(rig.shown("u1"), "62500m", "a division by nothing is no value");
}

#[test]
fn nodes_take_the_node_of_the_target() {
    let health = "metrics: [{name: health, source: s, series: gpu_health_score, per: nodes, acrossDevices: min}]\nexternal: []\n";
    let mut rig = rig(health, PodMode::Watched);
    rig.body(
        "t1",
        Some("n1"),
        "gpu_health_score{gpu=\"0\",uuid=\"a\"} 1\ngpu_health_score{gpu=\"1\",uuid=\"b\"} 0.5\n",
    );
    rig.body(
        "10.0.0.1:9410",
        None,
        "gpu_health_score{gpu=\"0\",uuid=\"c\"} 0.2\n",
    );
    assert_eq!(
        (rig.node("n1"), rig.node("10.0.0.1:9410")),
        ("500m".to_owned(), "200m".to_owned())
    );
}

#[test]
fn counters_become_rates_across_resets_of_one_kind() {
    let rate = "metrics: [{name: errors, source: s, series: gpu_nvlink_errors_total, sum: [kind], per: nodes, acrossDevices: sum, window: {length: 60s, function: rate}}]\nexternal: []\n";
    let mut rig = rig(rate, PodMode::Watched);
    let body = |crc: u32, replay: u32| {
        format!(
            "gpu_nvlink_errors_total{{uuid=\"a\",kind=\"crc\"}} {crc}\ngpu_nvlink_errors_total{{uuid=\"a\",kind=\"replay\"}} {replay}\n"
        )
    };
    rig.body("t1", Some("n1"), &body(1000, 5));
    assert_eq!(
        rig.node("n1"),
        "absent: has too few readings of gpu_nvlink_errors_total yet"
    );
    rig.after(10.0);
    rig.body("t1", Some("n1"), &body(1020, 5));
    assert_eq!(rig.node("n1"), "2");
    rig.after(10.0);
    rig.body("t1", Some("n1"), &body(0, 25));
    assert_eq!(rig.node("n1"), "2");
}

#[test]
fn an_external_series_is_gone_with_the_body_that_lacks_it() {
    let external =
        "metrics: []\nexternal: [{name: reason, source: s, series: gpu_health_reason, reduce: none}]\n";
    let mut rig = rig(external, PodMode::Watched);
    rig.body(
        "t1",
        Some("n1"),
        "gpu_health_reason{uuid=\"a\",reason=\"nvlink-down\"} 0.5\n",
    );
    let target = TargetId {
        source: Arc::from("s"),
        name: Arc::from("t1"),
    };
    let list = Arc::clone(&rig.writer.state().external[0][&target]);
    assert_eq!(list[0].labels["node"], "n1");
    rig.body("t1", Some("n1"), "");
    assert!(rig.writer.state().external[0][&target].is_empty());
    rig.writer.target_removed(&target, rig.now);
    assert!(rig.writer.state().external[0].is_empty() && rig.writer.state().targets.is_empty());
}

#[test]
fn a_reload_keeps_the_readings_of_what_did_not_change() {
    let mut rig = rig(BUSY, PodMode::Watched);
    rig.pods(vec![pod("u1", "p1", "n1", true)]);
    rig.body("t1", Some("n1"), &busy("u1", "p1", "g0", 0.5));
    let both = BUSY.replace(
        "metrics: [",
        "metrics: [{name: raw, source: s, series: gpu_pod_busy_ratio}, ",
    );
    rig.writer.configure(&config(&both), rig.now);
    let state = rig.writer.state();
    assert_eq!(state.metric(Per::Pods, "busy"), Some(1));
    assert_eq!(shown(state.custom[1].pods["ns"].get("u1").cloned()), "50");
    assert!(state.custom[0].pods.is_empty() && state.pods_known);
    assert!(
        state.catalog.custom[&GroupResource::parse("pods")]
            .metrics
            .contains("raw")
    );
}

#[test]
fn without_a_cluster_pods_live_as_long_as_they_are_reported() {
    let mut rig = rig(BUSY, PodMode::Reported);
    let ready = |value: u8| format!("gpu_pod_ready{{namespace=\"ns\",pod=\"p1\",pod_uid=\"u1\"}} {value}\n");
    let body = holds("u1", "p1", "g0") + &busy("u1", "p1", "g0", 0.5);
    rig.body("t1", None, &body);
    assert!(rig.shown("u1").contains("no known readiness"));
    rig.after(1.0);
    rig.body("t1", None, &(ready(0) + &body));
    assert!(rig.shown("u1").contains("is not ready"));
    rig.after(1.0);
    rig.body("t1", None, &(ready(1) + &body));
    assert_eq!(rig.shown("u1"), "50");
    rig.body("t1", None, "");
    assert_eq!(rig.shown("u1"), "nothing");
    assert!(rig.writer.state().pods.is_empty());
}

#[test]
fn long_silence_is_forgotten() {
    let mut rig = rig(BUSY, PodMode::Watched);
    rig.pods(vec![pod("u1", "p1", "n1", true)]);
    rig.body("t1", Some("n1"), &busy("u1", "p1", "g0", 0.5));
    rig.after(100.0);
    rig.writer.tidy(rig.now);
    assert_eq!(rig.shown("u1"), "50", "kept to tell its age");
    assert_eq!(rig.writer.state().targets.len(), 1);
    rig.after(1000.0);
    rig.writer.tidy(rig.now);
    assert!(
        rig.writer.state().targets.is_empty(),
        "a target that was removed and came back"
    );
    rig.writer
        .pod_change(PodChange::Apply(pod("u1", "p1", "n1", false)), rig.now);
    rig.writer
        .pod_change(PodChange::Apply(pod("u1", "p1", "n1", true)), rig.now);
    assert_ne!(rig.shown("u1"), "50");
}

#[derive(Debug, Clone)]
enum Step {
    Apply { uid: u8, node: u8, ready: bool },
    Remove { uid: u8 },
    Relist { uids: Vec<u8>, ready: bool },
    Body { node: u8, values: Vec<(u8, u8)> },
}

fn any_step() -> impl Strategy<Value = Step> {
    let uid = 0_u8..5;
    prop_oneof![
        (uid.clone(), 0_u8..3, any::<bool>()).prop_map(|(uid, node, ready)| Step::Apply { uid, node, ready }),
        uid.clone().prop_map(|uid| Step::Remove { uid }),
        (proptest::collection::vec(uid.clone(), 0..4), any::<bool>())
            .prop_map(|(uids, ready)| Step::Relist { uids, ready }),
        (0_u8..3, proptest::collection::vec((uid, 0_u8..100), 0..6))
            .prop_map(|(node, values)| Step::Body { node, values }),
    ]
}

proptest! {
    /// Any sequence of changes ends where a model without rings, claims and shared state ends.
    #[test]
    fn any_sequence_agrees_with_a_naive_model(steps in proptest::collection::vec(any_step(), 0..60)) {
        let mut rig = rig(&BUSY.replace("scale: 100", "scale: 100, pods: all"), PodMode::Watched);
        let mut pods: HashMap<u8, u8> = HashMap::new();
        let mut values: HashMap<u8, u8> = HashMap::new();
        let (uid_of, node_of) = (|uid: u8| format!("u{uid}"), |node: u8| format!("n{node}"));
        let make = |uid: u8, node: u8, ready: bool| pod(&uid_of(uid), &format!("p{uid}"), &node_of(node), ready);
        for step in steps {
            rig.after(1.0);
            match step {
                Step::Apply { uid, node, ready } => {
                    // A pod never moves: another node means another pod, so the model keeps the first.
                    let node = *pods.entry(uid).or_insert(node);
                    rig.writer.pod_change(PodChange::Apply(make(uid, node, ready)), rig.now);
                }
                Step::Remove { uid } => {
                    pods.remove(&uid);
                    values.remove(&uid);
                    rig.writer.pod_change(PodChange::Remove(Arc::from(uid_of(uid))), rig.now);
                }
                Step::Relist { uids, ready } => {
                    pods.retain(|uid, _| uids.contains(uid));
                    values.retain(|uid, _| uids.contains(uid));
                    let listed: Vec<Pod> = uids.iter().map(|uid| make(*uid, *pods.entry(*uid).or_insert(0), ready)).collect();
                    rig.writer.pod_change(PodChange::Replace(listed), rig.now);
                }
                Step::Body { node, values: said } => {
                    let said: BTreeMap<u8, u8> = said.into_iter().collect();
                    let text: String = said
                        .iter()
                        .map(|(uid, value)| busy(&uid_of(*uid), &format!("p{uid}"), "g", f64::from(*value) / 100.0))
                        .collect();
                    rig.body(&format!("t{node}"), Some(&node_of(node)), &text);
                    values.extend(said.into_iter().filter(|(uid, _)| pods.get(uid) == Some(&node)));
                }
            }
            for uid in 0..5 {
                let expected = values.get(&uid).map_or("nothing".to_owned(), u8::to_string);
                prop_assert_eq!(rig.shown(&uid_of(uid)), expected, "pod {}", uid);
            }
            let known: usize = rig.writer.state().pods.values().map(|pods| pods.len()).sum();
            prop_assert_eq!(known, pods.len());
        }
    }
}
