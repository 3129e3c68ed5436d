//! `docs/reference/metrics.md` from `signals`.
//!
//! Inputs: the tables of the vocabulary. Invariants: every family of every program appears, in the order in
//! which it is written.

use std::fmt::Write as _;

use forewarm_signals::{Family, MeasuredAt, TABLES, own};

use super::Generated;

/// The metrics reference.
pub(super) fn reference() -> Generated {
    let mut text = String::from(
        "# Metrics\n\n\
         Generated from the `signals` crate by `make generate`; do not edit.\n\n\
         A value's age is told by an age line beside it, never by a sample timestamp: measured-at is the \
         arrival of the response minus the age. *Age from* names the line: a group stands for \
         `gpu_sample_age_seconds{uuid,group}`, *pod* for `gpu_pod_sample_age_seconds{pod_uid,source}`, and \
         *now* means true at the moment of the response.\n",
    );
    for (part, families) in TABLES {
        let _infallible = writeln!(text, "\n## {}\n", capitalised(part));
        if families.is_empty() {
            text.push_str("None yet.\n");
            continue;
        }
        if let Some(place) = place(part) {
            let _infallible = writeln!(text, "{place}\n");
        }
        text.push_str("| family | type | labels | age from | meaning |\n|---|---|---|---|---|\n");
        families.iter().for_each(|family| row(&mut text, family));
    }
    Generated::new("docs/reference/metrics.md", text)
}

/// Where the families of a part are found.
fn place(part: &str) -> Option<String> {
    let own: Vec<String> = own::BESIDE_READINGS
        .iter()
        .map(|family| format!("`{}`", family.name))
        .collect();
    Some(match part {
        "exporter: devices" | "exporter: pods" => {
            "On `/metrics` of the metrics port (`--listen`).".to_owned()
        }
        "exporter: devices in detail" => {
            "On `/metrics/detail` of the metrics port (`--listen`), with the age lines that they need."
                .to_owned()
        }
        "exporter: itself" => format!(
            "On `/metrics` of the admin port (`--admin-listen`). These are on the metrics port as well: {}.",
            own.join(", ")
        ),
        "adapter: itself" | "every program" => {
            "On `/metrics` of the admin port (`--admin-listen`).".to_owned()
        }
        _ => return None,
    })
}

fn row(text: &mut String, family: &Family) {
    let labels: Vec<String> = family.labels.iter().map(|label| format!("`{label}`")).collect();
    let age = match family.measured {
        MeasuredAt::Device(group) => group.as_str(),
        MeasuredAt::Pod => "pod",
        MeasuredAt::Now => "now",
    };
    let _infallible = writeln!(
        text,
        "| `{}` | {} | {} | {age} | {} |",
        family.name,
        family.kind.openmetrics_type(),
        labels.join(", "),
        family.help.replace('|', "\\|")
    );
}

fn capitalised(text: &str) -> String {
    let mut letters = text.chars();
    letters
        .next()
        .map(|first| first.to_uppercase().collect::<String>() + letters.as_str())
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_family_has_a_row() {
        let text = reference().text;
        for family in forewarm_signals::all() {
            assert!(
                text.contains(&format!("| `{}` |", family.name)),
                "{}",
                family.name
            );
        }
        assert!(text.contains("## Exporter: devices"));
    }

    #[test]
    fn every_part_of_the_exporter_says_on_which_port_it_is() {
        for (part, _) in TABLES {
            if part.starts_with("exporter") {
                assert!(place(part).is_some_and(|place| place.contains("port")), "{part}");
            }
        }
        assert!(place("exporter: itself").is_some_and(|place| place.contains("forewarm_exporter_nvml_up")));
    }
}
