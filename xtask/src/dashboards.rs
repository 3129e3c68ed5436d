//! Dashboards and alerts may mention only series that exist.
//!
//! Inputs: Grafana JSON and rule YAML under `dashboards/`. Invariants: a series is known when `signals` names
//! it, a rule beside it records it, or it belongs to a listed neighbour; an expression that mentions no
//! series at all is a mistake too; Xids are selected by the list that the health score uses.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result};
use forewarm_signals::health::HARDWARE_XIDS;
use forewarm_signals::{Kind, by_name};
use serde_json::Value;

use crate::repository::run;
use crate::tidy::files;
use crate::{gobuild, promql};

/// Series of others that boards and alerts may use: Prometheus' own, and kube-state-metrics for HPA state.
const NEIGHBOURS: [&str; 2] = ["up", "ALERTS"];
/// Families of kube-state-metrics; anything else of Kubernetes is not on our boards.
const NEIGHBOUR_PREFIXES: [&str; 3] = ["kube_horizontalpodautoscaler_", "kube_deployment_", "kube_pod_"];

/// Every mention of an unknown series, one line each.
pub(crate) fn problems(root: &Path) -> Result<Vec<String>> {
    let mut problems = Vec::new();
    for path in files(&root.join("dashboards"))? {
        let name = path.strip_prefix(root).unwrap_or(&path).display().to_string();
        let text = || std::fs::read_to_string(&path).with_context(|| format!("reading {name}"));
        match path.extension().and_then(|extension| extension.to_str()) {
            Some("json") => {
                let board: Value = serde_json::from_str(&text()?).with_context(|| name.clone())?;
                problems.extend(check(&name, &[board]));
            }
            Some("yaml" | "yml") => {
                let documents: Vec<Value> = serde_saphyr::from_multiple(&text()?)
                    .map_err(|error| anyhow::anyhow!("{name}: {error}"))?;
                problems.extend(check(&name, &documents));
            }
            _ => {}
        }
    }
    Ok(problems)
}

/// Asks a real promtool whether the alert rules are rules, and whether they say what `alerts.test.yaml` wants.
pub(crate) fn alerts(root: &Path) -> Result<()> {
    let promtool = gobuild::promtool(root)?;
    for args in [
        ["check", "rules", "alerts.yaml"],
        ["test", "rules", "alerts.test.yaml"],
    ] {
        let mut command = Command::new(&promtool);
        run(command.args(args).current_dir(root.join("dashboards")))?;
    }
    Ok(())
}

fn check(file: &str, documents: &[Value]) -> Vec<String> {
    let mut expressions = Vec::new();
    let mut recorded = BTreeSet::new();
    for document in documents {
        collect(document, false, &mut expressions, &mut recorded);
    }
    let mut problems = Vec::new();
    for expression in expressions {
        let series = promql::series(&expression);
        if series.is_empty() {
            problems.push(format!("{file}: no series in {expression:?}"));
        }
        if other_xids(&expression) {
            problems.push(format!(
                "{file}: selects other Xids than signals::health::HARDWARE_XIDS, in {expression:?}"
            ));
        }
        for name in series {
            if !is_known(&name) && !recorded.contains(&name) {
                problems.push(format!(
                    "{file}: series {name} is unknown to signals, in {expression:?}"
                ));
            }
        }
    }
    problems
}

/// Gathers `expr` strings, template queries and recorded names from a tree.
fn collect(value: &Value, templating: bool, expressions: &mut Vec<String>, recorded: &mut BTreeSet<String>) {
    match value {
        Value::Object(fields) => {
            for (key, field) in fields {
                match (key.as_str(), field) {
                    ("expr", Value::String(text)) => expressions.push(text.clone()),
                    ("record", Value::String(name)) => {
                        recorded.insert(name.clone());
                    }
                    ("query" | "definition", Value::String(text)) if templating => {
                        expressions.extend(template_query(text));
                    }
                    _ => collect(field, templating || key == "templating", expressions, recorded),
                }
            }
        }
        Value::Array(items) => {
            items
                .iter()
                .for_each(|item| collect(item, templating, expressions, recorded));
        }
        _ => {}
    }
}

/// `label_values(series, label)` and `query_result(expr)`; other queries (of data source variables) have none.
fn template_query(text: &str) -> Option<String> {
    if let Some(inner) = text
        .strip_prefix("label_values(")
        .and_then(|rest| rest.strip_suffix(')'))
    {
        return inner
            .rsplit_once(',')
            .map(|(expression, _)| expression.to_owned());
    }
    text.strip_prefix("query_result(")
        .and_then(|rest| rest.strip_suffix(')'))
        .map(str::to_owned)
}

/// Whether the expression selects Xids by another list than ours.
fn other_xids(expression: &str) -> bool {
    let ours: Vec<String> = HARDWARE_XIDS.iter().map(u64::to_string).collect();
    expression
        .split("xid=~\"")
        .skip(1)
        .any(|rest| rest.split('"').next() != Some(&ours.join("|")))
}

fn is_known(name: &str) -> bool {
    let histogram = |suffix: &str| {
        name.strip_suffix(suffix)
            .and_then(by_name)
            .is_some_and(|family| family.kind == Kind::Histogram)
    };
    by_name(name).is_some()
        || ["_bucket", "_sum", "_count"].into_iter().any(histogram)
        || NEIGHBOURS.contains(&name)
        || NEIGHBOUR_PREFIXES.iter().any(|prefix| name.starts_with(prefix))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn known_series_pass() {
        let board = json!({
            "panels": [{"targets": [{"expr": "avg(gpu_busy_ratio) / scalar(kube_horizontalpodautoscaler_status_current_replicas)"}]}],
            "templating": {"list": [
                {"query": "label_values(gpu_info{gpu=\"0\"}, uuid)"},
                {"query": "prometheus", "type": "datasource"},
            ]},
        });
        assert_eq!(check("board", &[board]), Vec::<String>::new());
    }

    #[test]
    fn unknown_series_are_named_wherever_they_stand() {
        let board = json!({
            "panels": [{"panels": [{"targets": [{"expr": "gpu_bizzy_ratio"}]}]}],
            "templating": {"list": [{"definition": "label_values(gpu_nothing, uuid)"}]},
        });
        let problems = check("board", &[board]);
        assert_eq!(problems.len(), 2, "{problems:?}");
        assert!(problems.iter().any(|problem| problem.contains("gpu_bizzy_ratio")));
        assert!(problems.iter().any(|problem| problem.contains("gpu_nothing")));
    }

    #[test]
    fn an_alert_on_xids_follows_the_health_score() {
        let rule = |xids: &str| json!({"expr": format!("gpu_xid_total{{xid=~\"{xids}\"}} > 0")});
        let ours: Vec<String> = HARDWARE_XIDS.iter().map(u64::to_string).collect();
        assert_eq!(check("rules", &[rule(&ours.join("|"))]), Vec::<String>::new());
        assert_eq!(check("rules", &[rule("48|79")]).len(), 1);
    }

    #[test]
    fn recorded_series_are_known_and_empty_expressions_are_not() {
        let rules = json!({"groups": [{"rules": [
            {"record": "node:gpu_busy:avg", "expr": "avg(gpu_busy_ratio)"},
            {"alert": "Busy", "expr": "node:gpu_busy:avg > 0.9"},
            {"alert": "Empty", "expr": "vector(1)"},
        ]}]});
        let problems = check("rules", &[rules]);
        assert_eq!(problems.len(), 1, "{problems:?}");
        assert!(problems[0].contains("vector(1)"));
    }
}
