//! Values as the metrics API answers them, through the API server or from the adapter itself.
//!
//! Inputs: JSON bodies of `custom.metrics.k8s.io` v1beta2. Invariants: the age of a value is the time
//! from its `timestamp` (whole seconds, rounded down by the wire format) to the answer's arrival, so it is
//! never shown younger than it is, and up to a second older.

use std::collections::BTreeMap;

use jiff::Timestamp;
use serde_json::Value;

use super::judge::Refused;

/// One pod's value.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Reading {
    /// The value.
    pub value: f64,
    /// Seconds since it was measured.
    pub age: f64,
}

/// Values by pod, or why there is none.
pub type Answer = Result<BTreeMap<String, Reading>, Refused>;

/// Path of a metric of one pod, or of all that match a selector.
#[must_use]
pub fn path(namespace: &str, pod: &str, metric: &str, selector: &str) -> String {
    let base = format!("/apis/custom.metrics.k8s.io/v1beta2/namespaces/{namespace}/pods/{pod}/{metric}");
    if selector.is_empty() {
        base
    } else {
        format!("{base}?labelSelector={}", selector.replace('=', "%3D"))
    }
}

/// Reads a body.
///
/// # Errors
/// A message when the body is neither a list of values nor a Status.
pub fn read(code: u16, body: &[u8], now: Timestamp) -> Result<Answer, String> {
    let body: Value = serde_json::from_slice(body).map_err(|error| {
        format!("the metrics API answered {code} with something that is not JSON: {error}")
    })?;
    if code != 200 {
        let message = body["message"].as_str().unwrap_or_default().to_owned();
        return Ok(Err(Refused { code, message }));
    }
    let items = body["items"]
        .as_array()
        .ok_or("the metrics API answered without items")?;
    let mut readings = BTreeMap::new();
    for item in items {
        let pod = item["describedObject"]["name"]
            .as_str()
            .ok_or("an item without a name")?;
        let value = item["value"]
            .as_str()
            .and_then(quantity)
            .ok_or_else(|| format!("{pod}: {}", item["value"]))?;
        let measured: Timestamp = item["timestamp"]
            .as_str()
            .and_then(|text| text.parse().ok())
            .ok_or_else(|| format!("{pod}: timestamp {}", item["timestamp"]))?;
        let age = now.duration_since(measured).as_secs_f64().max(0.0);
        readings.insert(pod.to_owned(), Reading { value, age });
    }
    Ok(Ok(readings))
}

/// A Kubernetes quantity as a number; all that our adapter and the HPA write.
#[must_use]
pub fn quantity(text: &str) -> Option<f64> {
    const SUFFIXES: [(&str, f64); 15] = [
        ("Ki", 1024.0),
        ("Mi", 1_048_576.0),
        ("Gi", 1_073_741_824.0),
        ("Ti", 1_099_511_627_776.0),
        ("Pi", 1_125_899_906_842_624.0),
        ("Ei", 1_152_921_504_606_846_976.0),
        ("n", 1e-9),
        ("u", 1e-6),
        ("m", 1e-3),
        ("k", 1e3),
        ("M", 1e6),
        ("G", 1e9),
        ("T", 1e12),
        ("P", 1e15),
        ("E", 1e18),
    ];
    let plain = |text: &str| text.parse::<f64>().ok().filter(|number| number.is_finite());
    SUFFIXES
        .iter()
        .find_map(|(suffix, factor)| {
            text.strip_suffix(suffix)
                .and_then(plain)
                .map(|number| number * factor)
        })
        .or_else(|| plain(text))
}

/// Mean of the values.
#[must_use]
pub fn mean(readings: &BTreeMap<String, Reading>) -> Option<f64> {
    let count = u32::try_from(readings.len()).ok().filter(|count| *count > 0)?;
    Some(readings.values().map(|reading| reading.value).sum::<f64>() / f64::from(count))
}

/// Age of the oldest value.
#[must_use]
pub fn oldest(readings: &BTreeMap<String, Reading>) -> Option<f64> {
    readings.values().map(|reading| reading.age).reduce(f64::max)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_and_ages_come_from_the_body() {
        let body = br#"{"kind":"MetricValueList","items":[
            {"describedObject":{"name":"a"},"value":"62400m","timestamp":"2026-01-01T00:00:10Z"},
            {"describedObject":{"name":"b"},"value":"40","timestamp":"2026-01-01T00:00:11Z"}]}"#;
        let answer = read(200, body, "2026-01-01T00:00:12.5Z".parse().unwrap())
            .unwrap()
            .unwrap();
        assert!((answer["a"].value - 62.4).abs() < 1e-9 && (answer["a"].age - 2.5).abs() < 1e-9);
        assert!((mean(&answer).unwrap() - 51.2).abs() < 1e-9);
        assert!((oldest(&answer).unwrap() - 2.5).abs() < 1e-9);
    }

    #[test]
    fn a_refusal_keeps_code_and_message() {
        let answer = read(
            404,
            br#"{"kind":"Status","message":"12 s old"}"#,
            Timestamp::UNIX_EPOCH,
        )
        .unwrap();
        assert_eq!(
            answer,
            Err(Refused {
                code: 404,
                message: "12 s old".into()
            })
        );
        assert!(read(502, b"<html>", Timestamp::UNIX_EPOCH).is_err());
    }

    #[test]
    fn quantities_are_read() {
        for (text, number) in [
            ("85250m", 85.25),
            ("42", 42.0),
            ("1k", 1000.0),
            ("2Gi", 2_147_483_648.0),
            ("7E", 7e18),
        ] {
            assert!((quantity(text).unwrap() - number).abs() < 1e-6, "{text}");
        }
        assert_eq!(quantity("NaN"), None);
        assert_eq!(quantity("five"), None);
    }

    #[test]
    fn paths_escape_the_selector() {
        assert_eq!(
            path("demo", "%2A", "gpu_busy_percent", "app=llm"),
            "/apis/custom.metrics.k8s.io/v1beta2/namespaces/demo/pods/%2A/gpu_busy_percent?labelSelector=app%3Dllm"
        );
    }
}
