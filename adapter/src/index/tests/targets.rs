//! Several targets, sources and ways of measuring that speak of the same things.

use super::*;

const ERRORS: &str = "metrics: [{name: errors, source: s, series: gpu_nvlink_errors_total, sum: [kind], per: nodes, acrossDevices: sum, window: {length: 60s, function: rate}, maxAge: 20s}]\nexternal: []\n";

fn errors(count: u32) -> String {
    format!("gpu_nvlink_errors_total{{uuid=\"a\",kind=\"crc\"}} {count}\n")
}

#[test]
fn a_rate_told_by_two_targets_counts_its_growth_once() {
    let mut rig = rig(ERRORS, PodMode::Watched);
    // One counter of the driver, 3 a second, told by the exporter before and the one after a rolling update.
    for second in (0..30).step_by(2) {
        rig.body("old", Some("n1"), &errors(1000 + 3 * second));
        rig.after(0.5);
        rig.body("new", Some("n1"), &errors(1000 + 3 * second + 1));
        rig.after(1.5);
    }
    assert_eq!(rig.node("n1"), "3");
}

#[test]
fn counters_that_started_apart_are_not_mistaken_for_resets() {
    let mut rig = rig(ERRORS, PodMode::Watched);
    for second in (0..30).step_by(2) {
        rig.body("old", Some("n1"), &errors(5000 + 3 * second));
        rig.after(0.5);
        // Counted by the process itself, which has just started.
        rig.body("new", Some("n1"), &errors(3 * second));
        rig.after(1.5);
    }
    assert_eq!(rig.node("n1"), "3");
    // The one that stays goes on as before, whatever the other one's last word was.
    for second in (30..90).step_by(2) {
        rig.after(0.5);
        rig.body("new", Some("n1"), &errors(3 * second));
        rig.after(1.5);
    }
    assert_eq!(rig.node("n1"), "3");
}

fn claimed(value: f64) -> String {
    format!(
        "gpu_pod_ready{{namespace=\"ns\",pod=\"p1\",pod_uid=\"u1\"}} 1\n{}{}",
        holds("u1", "p1", "g0"),
        busy("u1", "p1", "g0", value)
    )
}

#[test]
fn two_claims_meet_however_rarely_their_source_is_read() {
    let config = "sources: [{name: s, scrape: {targets: ['a:1'], interval: 30s, timeout: 1s}}]\nmetrics: [{name: busy, source: s, series: gpu_pod_busy_ratio, scale: 100, maxAge: 90s}]\nexternal: []\n";
    let mut rig = rig(config, PodMode::Reported);
    rig.body("t1", None, &claimed(0.5));
    for _ in 0..4 {
        rig.after(12.0);
        rig.body("t2", None, &claimed(0.9));
        assert!(rig.shown("u1") == "50" || rig.shown("u1").contains("claimed by two"));
        rig.after(18.0);
        rig.body("t1", None, &claimed(0.5));
        assert_eq!(
            rig.shown("u1"),
            "absent: is claimed by two targets, t1 and t2, and its node is not known"
        );
    }
    // The second one falls silent.
    for _ in 0..4 {
        rig.after(30.0);
        rig.body("t1", None, &claimed(0.5));
    }
    assert_eq!(rig.shown("u1"), "50");
}

#[test]
fn a_target_of_no_known_node_does_not_dispute_one_on_the_pods_node() {
    let mut rig = rig(BUSY, PodMode::Watched);
    rig.pods(vec![pod("u1", "p1", "n1", true)]);
    rig.body("here", Some("n1"), &busy("u1", "p1", "g0", 0.5));
    rig.after(1.0);
    rig.body("somewhere", None, &busy("u1", "p1", "g0", 0.9));
    rig.after(1.0);
    rig.body("here", Some("n1"), &busy("u1", "p1", "g0", 0.5));
    assert_eq!(rig.shown("u1"), "50");
    assert_eq!(rig.dropped("conflict"), 1);
}

#[test]
fn two_sources_each_know_what_a_pod_holds() {
    let config = "sources: [{name: s, scrape: {targets: ['a:1']}}, {name: other, scrape: {targets: ['b:1']}}]\nmetrics: [{name: busy, source: s, series: gpu_pod_busy_ratio, scale: 100}]\nexternal: []\n";
    let mut rig = rig(config, PodMode::Watched);
    rig.pods(vec![pod("u1", "p1", "n1", true)]);
    let both = holds("u1", "p1", "g0") + &holds("u1", "p1", "g1");
    let wanted = "absent: has no reading of gpu_pod_busy_ratio for device g1";
    rig.body("t1", Some("n1"), &(busy("u1", "p1", "g0", 0.5) + &both));
    assert_eq!(rig.shown("u1"), wanted);
    // Another source says something else about the same pod, and then nothing.
    for text in [holds("u1", "p1", "g0"), String::new()] {
        rig.after(0.5);
        rig.body_of("other", "t2", Some("n1"), &text);
        rig.writer
            .pod_change(PodChange::Apply(pod("u1", "p1", "n1", false)), rig.now);
        rig.writer
            .pod_change(PodChange::Apply(pod("u1", "p1", "n1", true)), rig.now);
        rig.after(0.5);
        assert_eq!(
            rig.shown("u1"),
            wanted,
            "a mean over a part of the devices is no value"
        );
    }
}

fn by(source: &str, value: f64) -> String {
    busy("u1", "p1", "g0", value).replace("exclusive", source)
}

#[test]
fn a_stale_exact_value_does_not_hide_a_fresh_less_exact_one() {
    let mut rig = rig(BUSY, PodMode::Watched);
    rig.pods(vec![pod("u1", "p1", "n1", true)]);
    rig.body("t1", Some("n1"), &(by("exclusive", 0.5) + &by("process", 0.2)));
    assert_eq!(rig.shown("u1"), "50");
    // The device is shared from now on: only processes can be told apart.
    for _ in 0..5 {
        rig.after(2.0);
        rig.body("t1", Some("n1"), &by("process", 0.3));
    }
    assert_eq!(rig.shown("u1"), "50", "fresh for another moment");
    let Some(Entry::Value(value)) = rig.entry("u1") else {
        panic!()
    };
    let later = value.then.clone().unwrap();
    assert_eq!(later.quantity.to_string(), "30", "stands behind it");
    assert!(later.end() > value.end() && later.then.is_none());
    rig.after(2.0);
    rig.body("t1", Some("n1"), &by("process", 0.3));
    assert_eq!(rig.shown("u1"), "30");
}

#[test]
fn an_exact_way_of_measuring_that_fails_gives_way_to_another() {
    let mut rig = rig(BUSY, PodMode::Watched);
    rig.pods(vec![pod("u1", "p1", "n1", true)]);
    rig.body("t1", Some("n1"), &(by("exclusive", 0.5) + &by("process", 0.2)));
    assert_eq!(rig.shown("u1"), "50");
    rig.after(2.0);
    let twice = by("exclusive", 0.5) + &by("exclusive", 0.6);
    rig.body("t1", Some("n1"), &(twice.clone() + &by("process", 0.2)));
    assert_eq!(rig.shown("u1"), "20");
    rig.after(30.0);
    rig.body("t1", Some("n1"), &twice);
    let Some(Entry::Value(value)) = rig.entry("u1") else {
        return;
    };
    assert!(value.end() < rig.now, "nothing that is too old is served");
}

#[test]
fn what_never_had_a_reading_is_forgotten_too() {
    let mut rig = rig(ERRORS, PodMode::Watched);
    for i in 0..100 {
        rig.after(30.0);
        let text = format!("gpu_nvlink_errors_total{{uuid=\"slice-{i}\",kind=\"crc\"}} NaN\n");
        rig.body("t1", Some("n1"), &text);
        rig.writer.tidy(rig.now);
    }
    let held = |rig: &Rig| rig.writer.held();
    assert!(held(&rig) <= 10, "{}", held(&rig));
}

#[test]
fn the_same_series_in_another_order_of_labels_is_the_same() {
    let mut rig = rig(ERRORS, PodMode::Watched);
    let text = "gpu_nvlink_errors_total{uuid=\"a\",kind=\"crc\"} 1\ngpu_nvlink_errors_total{kind=\"crc\",uuid=\"a\"} 1\n";
    rig.body("t1", Some("n1"), text);
    assert!(rig.node("n1").contains("twice in one body"), "{}", rig.node("n1"));
}

#[test]
fn readiness_says_since_when_nobody_confirms_it() {
    let mut rig = rig(BUSY, PodMode::Watched);
    rig.pods(vec![pod("u1", "p1", "n1", true)]);
    let broke = rig.now;
    rig.writer.pod_change(PodChange::Silent(broke), rig.now);
    rig.after(5.0);
    rig.body("t1", Some("n1"), &busy("u1", "p1", "g0", 0.5));
    rig.writer.configure(&config(BUSY), rig.now);
    assert_eq!(rig.writer.state().pods_silent_since, Some(broke));
    assert_eq!(rig.shown("u1"), "50", "kept for as long as readiness holds");
    rig.writer.pod_change(PodChange::Heard, rig.now);
    assert_eq!(rig.writer.state().pods_silent_since, None);
}
