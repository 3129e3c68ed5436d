//! Lists of external metric values, v1beta1.
//!
//! Purpose: the body that HPA sums over.
//! Inputs: values of one external metric.
//! Invariants: `metricLabels` is always an object.

use std::collections::BTreeMap;

use bytes::Bytes;
use serde::Serialize;

use super::time::Seconds;
use super::{EXTERNAL_KIND, ListMeta, window_seconds};
use crate::provider::ExternalValue;

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct List<'a> {
    kind: &'static str,
    api_version: &'static str,
    metadata: ListMeta,
    items: Vec<Item<'a>>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Item<'a> {
    metric_name: &'a str,
    metric_labels: &'a BTreeMap<String, String>,
    timestamp: Seconds,
    #[serde(skip_serializing_if = "Option::is_none")]
    window: Option<u64>,
    value: String,
}

/// The body of an answer with `values` of `metric`.
#[must_use]
pub fn external_list(metric: &str, values: &[ExternalValue]) -> Bytes {
    let list = List {
        kind: EXTERNAL_KIND,
        api_version: "external.metrics.k8s.io/v1beta1",
        metadata: ListMeta {},
        items: values
            .iter()
            .map(|value| Item {
                metric_name: metric,
                metric_labels: &value.labels,
                timestamp: Seconds(value.measured_at),
                window: window_seconds(value.window),
                value: value.value.to_string(),
            })
            .collect(),
    };
    // Strings and integers always serialise.
    serde_json::to_vec(&list).unwrap_or_default().into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quantity::Quantity;
    use std::time::{Duration, UNIX_EPOCH};

    #[test]
    fn labels_survive_and_a_gauge_has_no_window() {
        let value = ExternalValue {
            labels: BTreeMap::from([
                ("pool".to_owned(), "h100".to_owned()),
                ("q".to_owned(), "a\"b".to_owned()),
            ]),
            value: Quantity::from_millis(7_500),
            measured_at: UNIX_EPOCH + Duration::from_secs(1_790_000_000),
            window: None,
        };
        let body: serde_json::Value =
            serde_json::from_slice(&external_list("forewarm_pool_demand_gpus", &[value])).unwrap();
        insta::assert_snapshot!(serde_json::to_string_pretty(&body).unwrap());
    }

    #[test]
    fn no_values_are_an_empty_list_and_not_null() {
        let body = external_list("m", &[]);
        assert!(std::str::from_utf8(&body).unwrap().contains("\"items\":[]"));
    }
}
