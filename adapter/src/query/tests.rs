//! Questions of an HPA against states, with values, gaps and failing targets.

use std::collections::{BTreeMap, HashMap};

use super::*;
use crate::config::{Options, parse};
use crate::index::{Entry, ExternalSeries, Failure, Pod, TargetId, TargetState};
use crate::provider::GroupResource;

fn state(config: &str) -> State {
    let head = "apiVersion: forewarm.dev/v1alpha1\nkind: AdapterConfig\nsources: [{name: s, scrape: {targets: ['a:1']}}]\n";
    let mut state = State::empty(Arc::new(
        parse("test", &format!("{head}{config}"), Options::default()).unwrap(),
    ));
    state.pods_known = true;
    state
}

const BUSY: &str = "metrics: [{name: busy, source: s, series: x}, {name: busy, source: s, series: x, per: namespaces, acrossDevices: sum}, {name: health, source: s, series: x, per: nodes}]\nexternal: []\n";

fn clock() -> Clock {
    Clock {
        now: Instant::now() + Duration::from_secs(100_000),
        wall: SystemTime::UNIX_EPOCH + Duration::from_secs(1_700_000_000),
    }
}

fn target(name: &str) -> TargetId {
    TargetId {
        source: Arc::from("s"),
        name: Arc::from(name),
    }
}

fn value(millis: i64, age: f64, clock: Clock) -> Entry {
    Entry::Value(Value {
        quantity: Quantity::from_millis(millis),
        measured_at: clock.now - Duration::from_secs_f64(age),
        max_age: Duration::from_secs(10),
        window: None,
        target: target("node-a"),
        then: None,
    })
}

fn with_pod(state: &mut State, name: &str, app: &str, entry: Option<Entry>) {
    let pod = Pod {
        uid: Arc::from(format!("uid-{name}")),
        namespace: Arc::from("ns"),
        name: Arc::from(name),
        labels: BTreeMap::from([("app".to_owned(), app.to_owned())]),
        node: Some(Arc::from("n1")),
        ready: Some(true),
        ready_since: None,
    };
    let uid = Arc::clone(&pod.uid);
    Arc::make_mut(state.pods.entry(Arc::from("ns")).or_default()).insert(Arc::from(name), Arc::new(pod));
    if let Some(entry) = entry {
        for metric in &mut state.custom[..2] {
            Arc::make_mut(metric.pods.entry(Arc::from("ns")).or_default())
                .insert(Arc::clone(&uid), entry.clone());
        }
    }
}

fn ask(state: &State, selector: &str, metric: &str, clock: Clock) -> Result<Vec<(String, String)>, Refusal> {
    let selector = Selector::parse(selector).unwrap();
    let query = ObjectQuery::Pods {
        namespace: "ns",
        name: None,
        selector: &selector,
    };
    let values = custom(state, &query, metric, &Selector::default(), clock)?;
    Ok(values
        .into_iter()
        .map(|value| (value.object.name, value.value.to_string()))
        .collect())
}

#[test]
fn the_fresh_part_of_the_matching_pods_is_returned() {
    let (mut state, clock) = (state(BUSY), clock());
    with_pod(&mut state, "a", "llm", Some(value(50_000, 1.0, clock)));
    with_pod(&mut state, "b", "llm", Some(value(70_500, 10.0, clock)));
    with_pod(&mut state, "c", "llm", Some(value(1, 10.5, clock)));
    with_pod(
        &mut state,
        "d",
        "llm",
        Some(Entry::Withheld(Arc::from("is not ready"))),
    );
    with_pod(&mut state, "e", "llm", None);
    with_pod(&mut state, "f", "other", Some(value(1, 1.0, clock)));
    let expected = [("a", "50"), ("b", "70500m")].map(|(name, value)| (name.to_owned(), value.to_owned()));
    assert_eq!(ask(&state, "app=llm", "busy", clock).unwrap(), expected);
    assert_eq!(ask(&state, "", "busy", clock).unwrap().len(), 3);
}

#[test]
fn a_timestamp_is_the_time_of_the_reading() {
    let (mut state, clock) = (state(BUSY), clock());
    with_pod(&mut state, "a", "llm", Some(value(50_000, 2.5, clock)));
    let query = ObjectQuery::Pods {
        namespace: "ns",
        name: Some("a"),
        selector: &Selector::default(),
    };
    let values = custom(&state, &query, "busy", &Selector::default(), clock).unwrap();
    assert_eq!(values[0].measured_at, clock.wall - Duration::from_millis(2500));
    assert_eq!(
        (
            values[0].object.kind.as_str(),
            values[0].object.namespace.as_deref()
        ),
        ("Pod", Some("ns"))
    );
}

#[test]
fn nothing_fresh_names_metric_selector_age_and_cause() {
    let (mut state, clock) = (state(BUSY), clock());
    with_pod(&mut state, "a", "llm", Some(value(50_000, 14.0, clock)));
    state.targets.insert(
        target("node-a"),
        TargetState {
            node: Some(Arc::from("n1")),
            last_ok: None,
            failure: Some(Failure {
                at: clock.now - Duration::from_secs(2),
                text: Arc::from("timeout: no complete answer within 1 s"),
            }),
        },
    );
    let refusal = ask(&state, "app=llm", "busy", clock).unwrap_err();
    assert_eq!(
        refusal,
        Refusal::NoSample(
            "no fresh sample of busy for 1 running pods in namespace ns (selector app=llm): pod a has its last sample 14 s ago, older than maxAge 10 s; target node-a failed 2 s ago: timeout: no complete answer within 1 s"
                .to_owned()
        )
    );
    with_pod(
        &mut state,
        "a",
        "llm",
        Some(Entry::Withheld(Arc::from("is not ready"))),
    );
    for name in ["b", "c", "d", "e"] {
        with_pod(&mut state, name, "llm", None);
    }
    let text = ask(&state, "app=llm", "busy", clock).unwrap_err().to_string();
    assert!(
        text.contains("pod a is not ready; pod b was never reported; target node-a failed"),
        "{text}"
    );
    assert!(text.ends_with("and 2 more"), "{text}");
}

#[test]
fn a_pod_on_a_node_without_a_target_is_told_so() {
    let (mut state, clock) = (state(BUSY), clock());
    with_pod(&mut state, "a", "llm", None);
    let text = ask(&state, "", "busy", clock).unwrap_err().to_string();
    assert!(
        text.ends_with("pod a was never reported; source s has no targets"),
        "{text}"
    );
    let elsewhere = TargetState {
        node: Some(Arc::from("n2")),
        ..TargetState::default()
    };
    state.targets.insert(target("t"), elsewhere);
    let text = ask(&state, "", "busy", clock).unwrap_err().to_string();
    assert!(text.ends_with("source s has no target on node n1"), "{text}");
}

#[test]
fn what_is_not_there_is_told_apart() {
    let (mut state, clock) = (state(BUSY), clock());
    with_pod(&mut state, "a", "llm", Some(value(1, 1.0, clock)));
    assert!(matches!(
        ask(&state, "", "nonsense", clock),
        Err(Refusal::UnknownMetric { .. })
    ));
    assert!(matches!(
        ask(&state, "app=none", "busy", clock),
        Err(Refusal::NoPodsMatch { .. })
    ));
    let query = ObjectQuery::Pods {
        namespace: "ns",
        name: None,
        selector: &Selector::default(),
    };
    let by_label = Selector::parse("direction=rx").unwrap();
    assert!(matches!(
        custom(&state, &query, "busy", &by_label, clock),
        Err(Refusal::BadSelector(_))
    ));
    let other = GroupResource::parse("deployments.apps");
    let query = ObjectQuery::Object {
        namespace: Some("ns"),
        resource: &other,
        name: Some("x"),
        selector: &Selector::default(),
    };
    assert!(matches!(
        custom(&state, &query, "busy", &Selector::default(), clock),
        Err(Refusal::UnknownMetric { .. })
    ));
    state.pods_known = false;
    assert!(matches!(
        ask(&state, "", "busy", clock),
        Err(Refusal::Unavailable(_))
    ));
}

#[test]
fn a_namespace_is_not_read_through_another_one() {
    let (mut state, clock) = (state(BUSY), clock());
    with_pod(&mut state, "a", "llm", Some(value(1500, 1.0, clock)));
    for segment in ["namespaces", "namespace"] {
        let resource = GroupResource::parse(segment);
        let ask = |through: Option<&str>| {
            let query = ObjectQuery::Object {
                namespace: through,
                resource: &resource,
                name: Some("ns"),
                selector: &Selector::default(),
            };
            custom(&state, &query, "busy", &Selector::default(), clock)
        };
        assert_eq!(ask(Some("ns")).unwrap().len(), 1, "its own");
        assert!(
            matches!(ask(Some("tenant")), Err(Refusal::UnknownMetric { .. })),
            "through the namespace that the review was about"
        );
    }
}

#[test]
fn a_namespace_is_all_its_ready_pods_or_nothing() {
    let (mut state, clock) = (state(BUSY), clock());
    let query = ObjectQuery::Namespace { namespace: "ns" };
    let ask = |state: &State| custom(state, &query, "busy", &Selector::default(), clock);
    with_pod(&mut state, "a", "llm", Some(value(1500, 1.0, clock)));
    with_pod(&mut state, "b", "llm", Some(value(2000, 3.0, clock)));
    with_pod(
        &mut state,
        "c",
        "llm",
        Some(Entry::Withheld(Arc::from("is not ready"))),
    );
    let values = ask(&state).unwrap();
    assert_eq!(
        (values.len(), values[0].value.to_string()),
        (1, "3500m".to_owned())
    );
    assert_eq!(values[0].measured_at, clock.wall - Duration::from_secs(3));
    with_pod(&mut state, "b", "llm", Some(value(2000, 30.0, clock)));
    let text = ask(&state).unwrap_err().to_string();
    assert!(text.contains("pod b has its last sample 30 s ago"), "{text}");
}

#[test]
fn readiness_that_nobody_confirms_is_believed_for_a_minute_only() {
    let (mut state, clock) = (state(BUSY), clock());
    with_pod(&mut state, "a", "llm", Some(value(50_000, 1.0, clock)));
    let sum = |state: &State| {
        let query = ObjectQuery::Namespace { namespace: "ns" };
        custom(state, &query, "busy", &Selector::default(), clock)
    };
    // An API server that restarts takes nothing away.
    state.pods_silent_since = Some(clock.now - READINESS_HOLDS);
    assert_eq!(ask(&state, "", "busy", clock).unwrap().len(), 1);
    assert_eq!(sum(&state).unwrap().len(), 1);
    state.pods_silent_since = Some(clock.now - Duration::from_secs(75));
    for refusal in [
        ask(&state, "", "busy", clock).unwrap_err(),
        sum(&state).unwrap_err(),
    ] {
        assert_eq!(
            refusal,
            Refusal::Unavailable(
                "busy is withheld: which pods are ready was last known 75 s ago, longer than 60 s, because the watch of pods is broken (pods: ready)"
                    .to_owned()
            )
        );
    }
    // What does not ask for readiness does not depend on it.
    let mut all = self::state(&BUSY.replace("series: x}", "series: x, pods: all}"));
    with_pod(&mut all, "a", "llm", Some(value(50_000, 1.0, clock)));
    all.pods_silent_since = state.pods_silent_since;
    assert_eq!(ask(&all, "", "busy", clock).unwrap().len(), 1);
}

#[test]
fn what_stands_behind_a_value_is_served_once_it_is_too_old() {
    let (mut state, clock) = (state(BUSY), clock());
    let Entry::Value(later) = value(30_000, 5.0, clock) else {
        panic!()
    };
    let Entry::Value(mut first) = value(50_000, 10.0, clock) else {
        panic!()
    };
    first.then = Some(Arc::new(later));
    with_pod(&mut state, "a", "llm", Some(Entry::Value(first)));
    let at = |seconds: f64| Clock {
        now: clock.now + Duration::from_secs_f64(seconds),
        ..clock
    };
    let shown = |clock| ask(&state, "", "busy", clock).map(|values| values[0].1.clone());
    assert_eq!(shown(at(0.0)).unwrap(), "50");
    assert_eq!(shown(at(0.1)).unwrap(), "30");
    assert!(shown(at(5.1)).unwrap_err().to_string().contains("10 s ago"));
}

#[test]
fn a_node_is_found_through_any_namespace() {
    let (mut state, clock) = (state(BUSY), clock());
    state.custom[2]
        .nodes
        .insert(Arc::from("n1"), value(900, 1.0, clock));
    let nodes = GroupResource::parse("nodes");
    let ask = |name: Option<&str>, selector: &str| {
        let selector = Selector::parse(selector).unwrap();
        let query = ObjectQuery::Object {
            namespace: Some("serving"),
            resource: &nodes,
            name,
            selector: &selector,
        };
        custom(&state, &query, "health", &Selector::default(), clock)
    };
    let found = ask(Some("n1"), "").unwrap();
    assert_eq!(
        (
            found[0].object.kind.as_str(),
            found[0].object.namespace.as_deref(),
            found[0].value.to_string()
        ),
        ("Node", None, "900m".to_owned())
    );
    assert_eq!(ask(None, "").unwrap().len(), 1);
    assert!(
        ask(Some("n2"), "")
            .unwrap_err()
            .to_string()
            .contains("node n2: it was never reported")
    );
    assert!(matches!(ask(None, "a=b"), Err(Refusal::BadSelector(_))));
}

fn external_state(reduce: &str, clock: Clock) -> State {
    let fence = "namespaceLabel: namespace";
    let mut state = state(&format!(
        "metrics: []\nexternal: [{{name: open, source: s, series: x, reduce: {reduce}}}, {{name: closed, source: s, series: x, namespaces: [ops]}}, {{name: fenced, source: s, series: x, reduce: {reduce}, {fence}}}]\n"
    ));
    let series = |node: &str, value: f64, age: u64| ExternalSeries {
        labels: BTreeMap::from([
            ("node".to_owned(), node.to_owned()),
            ("namespace".to_owned(), node.to_owned()),
        ]),
        value,
        measured_at: clock.now - Duration::from_secs(age),
    };
    let lists = HashMap::from([
        (
            target("t1"),
            Arc::new(vec![series("n1", 1.0, 1), series("n2", 2.5, 2)]),
        ),
        (target("t2"), Arc::new(vec![series("n3", 7.0, 60)])),
    ]);
    state.external = vec![lists; 3];
    state
}

#[test]
fn external_series_are_reduced_after_the_selector() {
    let clock = clock();
    let all = Selector::default();
    let one = Selector::parse("node=n1").unwrap();
    let ask = |reduce: &str, selector: &Selector| {
        external(&external_state(reduce, clock), "ns", "open", selector, clock).map(|values| {
            values
                .iter()
                .map(|value| value.value.to_string())
                .collect::<Vec<_>>()
        })
    };
    assert_eq!(ask("none", &all).unwrap(), ["1", "2500m"]);
    assert_eq!(ask("sum", &all).unwrap(), ["3500m"]);
    assert_eq!(ask("max", &all).unwrap(), ["2500m"]);
    assert!(matches!(ask("only", &all), Err(Refusal::Ambiguous(_))));
    assert_eq!(ask("only", &one).unwrap(), ["1"]);
    let stale = Selector::parse("node=n3").unwrap();
    let text = ask("none", &stale).unwrap_err().to_string();
    assert!(
        text.contains("(selector node=n3): last sample 60 s ago, older than maxAge 10 s"),
        "{text}"
    );
    assert!(
        ask("none", &Selector::parse("node=n9").unwrap())
            .unwrap_err()
            .to_string()
            .contains("no series match")
    );
}

#[test]
fn what_two_exporters_of_one_node_both_say_counts_once() {
    let clock = clock();
    let ask = |family: &str, key: &str, reduce: &str| {
        let series = |value: f64, age: u64| ExternalSeries {
            labels: BTreeMap::from([(key.to_owned(), "x".to_owned())]),
            value,
            measured_at: clock.now - Duration::from_secs(age),
        };
        let mut state = state(&format!(
            "metrics: []\nexternal: [{{name: open, source: s, series: {family}, reduce: {reduce}}}]\n"
        ));
        state.external = vec![HashMap::from([
            (target("old"), Arc::new(vec![series(1.0, 3)])),
            (target("new"), Arc::new(vec![series(0.5, 1)])),
        ])];
        let all = Selector::default();
        external(&state, "ns", "open", &all, clock).map(|values| {
            let texts = values.iter().map(|value| value.value.to_string());
            texts.collect::<Vec<_>>()
        })
    };
    for reduce in ["none", "sum", "only", "max"] {
        assert_eq!(
            ask("gpu_health_reason", "node", reduce).unwrap(),
            ["500m"],
            "{reduce}"
        );
    }
    // These may be two facts: requests of two replicas, idle GPUs of two nodes that are not named.
    assert_eq!(ask("foreign_requests", "node", "sum").unwrap(), ["1500m"]);
    assert_eq!(ask("gpu_node_idle", "resource", "sum").unwrap(), ["1500m"]);
}

#[test]
fn tenants_see_their_own_and_nothing_else() {
    let clock = clock();
    let state = external_state("none", clock);
    let all = Selector::default();
    assert!(matches!(
        external(&state, "ns", "closed", &all, clock),
        Err(Refusal::UnknownMetric { .. })
    ));
    assert!(!matches!(
        external(&state, "ops", "closed", &all, clock),
        Err(Refusal::UnknownMetric { .. })
    ));
    let own = external(&state, "n2", "fenced", &all, clock).unwrap();
    assert_eq!((own.len(), own[0].labels["namespace"].as_str()), (1, "n2"));
    assert!(matches!(
        external(&state, "n4", "fenced", &all, clock),
        Err(Refusal::NoSample(_))
    ));
}
