//! The series that a PromQL expression mentions.
//!
//! Inputs: an expression as in a dashboard or an alert, Grafana variables included. Invariants: pure; label
//! names, label values, functions, operators, durations and `by (…)` lists are no series.

use std::collections::BTreeSet;

/// Words that stand where a series may stand but are none.
const WORDS: [&str; 14] = [
    "and",
    "or",
    "unless",
    "by",
    "without",
    "on",
    "ignoring",
    "group_left",
    "group_right",
    "bool",
    "offset",
    "inf",
    "nan",
    "atan2",
];
/// Words that a list of labels in parentheses follows.
const LABEL_LISTS: [&str; 6] = ["by", "without", "on", "ignoring", "group_left", "group_right"];

/// Every series name in the expression.
pub(crate) fn series(expression: &str) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    let mut rest = expression;
    let mut label_list_follows = false;
    while let Some(first) = rest.chars().next() {
        let tail = &rest[first.len_utf8()..];
        match first {
            '"' | '\'' | '`' => {
                rest = after_string(tail, first);
                continue;
            }
            '{' => {
                rest = after_block(tail, '}');
                continue;
            }
            '[' => {
                rest = after_block(tail, ']');
                continue;
            }
            '(' if label_list_follows => {
                label_list_follows = false;
                rest = after_block(tail, ')');
                continue;
            }
            '#' => {
                rest = tail.split_once('\n').map_or("", |(_, next)| next);
                continue;
            }
            '$' => {
                rest = after_variable(tail);
                continue;
            }
            _ => {}
        }
        if first.is_ascii_digit() {
            // A number or a duration such as 5m, 1h30m, 1e3, 0x1f.
            rest = rest.trim_start_matches(|c: char| c.is_ascii_alphanumeric() || c == '.');
            continue;
        }
        if first.is_ascii_alphabetic() || first == '_' || first == ':' {
            let end = rest
                .find(|c: char| !(c.is_ascii_alphanumeric() || c == '_' || c == ':'))
                .unwrap_or(rest.len());
            let (word, after) = rest.split_at(end);
            let lower = word.to_ascii_lowercase();
            label_list_follows = LABEL_LISTS.contains(&lower.as_str());
            let is_function = after.trim_start().starts_with('(') && !word.contains(':');
            if !is_function && !WORDS.contains(&lower.as_str()) && !is_aggregation_before_by(after) {
                found.insert(word.to_owned());
            }
            rest = after;
            continue;
        }
        if !first.is_whitespace() {
            label_list_follows = false;
        }
        rest = tail;
    }
    found
}

/// `sum by (x) (…)`: the word before a grouping is an aggregation.
fn is_aggregation_before_by(after: &str) -> bool {
    let next = after.trim_start();
    ["by", "without"].iter().any(|word| {
        next.strip_prefix(word)
            .is_some_and(|tail| tail.trim_start().starts_with('('))
    })
}

fn after_string(text: &str, quote: char) -> &str {
    let mut escaped = false;
    for (index, c) in text.char_indices() {
        if escaped {
            escaped = false;
        } else if c == '\\' && quote != '`' {
            escaped = true;
        } else if c == quote {
            return &text[index + c.len_utf8()..];
        }
    }
    ""
}

fn after_block(text: &str, close: char) -> &str {
    let mut rest = text;
    while let Some(first) = rest.chars().next() {
        let tail = &rest[first.len_utf8()..];
        if first == close {
            return tail;
        }
        rest = match first {
            '"' | '\'' | '`' => after_string(tail, first),
            // A Grafana variable such as ${x} may stand in a block.
            '$' => after_variable(tail),
            _ => tail,
        };
    }
    ""
}

fn after_variable(text: &str) -> &str {
    match text.strip_prefix('{') {
        Some(inner) => inner.split_once('}').map_or("", |(_, after)| after),
        None => text.trim_start_matches(|c: char| c.is_ascii_alphanumeric() || c == '_'),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(expression: &str) -> Vec<String> {
        series(expression).into_iter().collect()
    }

    #[test]
    fn plain_series_and_selectors() {
        assert_eq!(names("gpu_up"), ["gpu_up"]);
        assert_eq!(names(r#"gpu_up{gpu="0",uuid=~"GPU-.*} and x"} == 0"#), ["gpu_up"]);
        assert_eq!(names("gpu_up == 0 # gpu_down is a comment"), ["gpu_up"]);
    }

    #[test]
    fn functions_aggregations_and_label_lists_are_no_series() {
        assert_eq!(
            names("rate(gpu_energy_joules_total[5m])"),
            ["gpu_energy_joules_total"]
        );
        assert_eq!(
            names("sum by (namespace, pod) (gpu_pod_busy_ratio)"),
            ["gpu_pod_busy_ratio"]
        );
        assert_eq!(
            names("sum(gpu_pod_busy_ratio) without(pod)"),
            ["gpu_pod_busy_ratio"]
        );
        assert_eq!(
            names("gpu_busy_ratio * on (gpu, uuid) group_left (model) gpu_info"),
            ["gpu_busy_ratio", "gpu_info"]
        );
        assert_eq!(
            names("topk(5, max_over_time(gpu_power_watts[1h:1m] offset 5m))"),
            ["gpu_power_watts"]
        );
        assert_eq!(
            names("histogram_quantile(0.99, sum by (le) (rate(x_seconds_bucket[5m])))"),
            ["x_seconds_bucket"]
        );
    }

    #[test]
    fn operators_and_numbers_are_no_series() {
        assert_eq!(
            names("a_b > bool 1e3 or c_d unless Inf and e:f"),
            ["a_b", "c_d", "e:f"]
        );
        assert_eq!(
            names("gpu_sample_age_seconds > 10 and on(pod) time() - 5m > 0x1f"),
            ["gpu_sample_age_seconds"]
        );
    }

    #[test]
    fn grafana_variables_are_no_series() {
        assert_eq!(
            names(
                r#"rate(gpu_nvlink_bytes_total{node=~"$node", gpu="${gpu:regex}"}[$__rate_interval]) > $threshold"#
            ),
            ["gpu_nvlink_bytes_total"]
        );
        assert_eq!(
            names("label_values(gpu_info{node=\"$node\"}, uuid)"),
            ["gpu_info", "uuid"]
        );
    }
}
