//! `docs/reference/adapter-config.schema.json` and the same as a page for people.
//!
//! Inputs: the JSON schema of the adapter's configuration and its defaults. Invariants: each type of the
//! schema is one table, in the order in which a reader meets it; the page ends with the defaults as shipped.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use anyhow::{Context as _, Result};
use serde_json::Value;

use super::Generated;

/// The schema for editors and the page for people.
pub(super) fn reference(schema: &Value, defaults: &str) -> Result<Vec<Generated>> {
    let json = serde_json::to_string_pretty(schema).context("schema of the configuration")?;
    Ok(vec![
        Generated::new("docs/reference/adapter-config.schema.json", format!("{json}\n")),
        Generated::new("docs/reference/adapter-config.md", page(schema, defaults)),
    ])
}

fn page(schema: &Value, defaults: &str) -> String {
    let mut text = String::from(
        "# Adapter configuration\n\n\
         Generated from the adapter's types by `make generate`; do not edit. Editors check a file against \
         [adapter-config.schema.json](adapter-config.schema.json); `forewarm-adapter check-config` checks it whole.\n",
    );
    describe(&mut text, schema, "AdapterConfig");
    let mut seen = BTreeSet::new();
    let mut open = mentioned(schema);
    while let Some(name) = open.pop() {
        if !seen.insert(name.clone()) {
            continue;
        }
        if let Some(definition) = schema["$defs"].get(&name) {
            describe(&mut text, definition, &name);
            open.extend(mentioned(definition));
        }
    }
    let _infallible = write!(
        text,
        "\n## Defaults\n\nWhat stands where a file leaves `sources`, `metrics` or `external` out.\n\n```yaml\n{}\n```\n",
        defaults.trim_end()
    );
    text
}

/// Names of the types that the fields of a definition refer to, the first one last, as a stack wants it.
fn mentioned(definition: &Value) -> Vec<String> {
    let mut names = Vec::new();
    for field in definition["properties"]
        .as_object()
        .into_iter()
        .flat_map(|fields| fields.values())
    {
        collect_references(field, &mut names);
    }
    names.reverse();
    names
}

fn collect_references(value: &Value, names: &mut Vec<String>) {
    match value {
        Value::Object(fields) => {
            for (key, field) in fields {
                match field {
                    Value::String(reference) if key == "$ref" => names.push(referenced(reference).to_owned()),
                    _ => collect_references(field, names),
                }
            }
        }
        Value::Array(items) => items.iter().for_each(|item| collect_references(item, names)),
        _ => {}
    }
}

fn referenced(reference: &str) -> &str {
    reference.rsplit('/').next().unwrap_or(reference)
}

fn describe(text: &mut String, definition: &Value, name: &str) {
    let _infallible = writeln!(text, "\n## {name}\n");
    if let Some(description) = definition["description"].as_str() {
        let _infallible = writeln!(text, "{}\n", cell(description));
    }
    if let Some(values) = definition["enum"].as_array() {
        let values: Vec<String> = values
            .iter()
            .filter_map(Value::as_str)
            .map(|value| format!("`{value}`"))
            .collect();
        let _infallible = writeln!(text, "One of {}.", values.join(", "));
    }
    // A value that may be written in several ways has a description for each.
    for form in definition["anyOf"].as_array().into_iter().flatten() {
        if let Some(description) = form["description"].as_str() {
            let _infallible = writeln!(text, "- {}: {}", type_of(form), cell(description));
        }
    }
    let Some(fields) = definition["properties"].as_object() else {
        return;
    };
    text.push_str("| field | type | meaning |\n|---|---|---|\n");
    for (field, property) in fields {
        let _infallible = writeln!(
            text,
            "| `{field}` | {} | {} |",
            type_of(property),
            cell(property["description"].as_str().unwrap_or_default())
        );
    }
}

/// The type as one would say it: `string`, `list of Metric`, `map of string`.
fn type_of(property: &Value) -> String {
    if let Some(reference) = property["$ref"].as_str() {
        let name = referenced(reference);
        return format!("[{name}](#{})", name.to_lowercase());
    }
    for choice in ["anyOf", "oneOf"] {
        if let Some(choices) = property[choice].as_array() {
            let names: Vec<String> = choices
                .iter()
                .filter(|choice| choice["type"] != "null")
                .map(type_of)
                .collect();
            return names.join(" or ");
        }
    }
    let name = match &property["type"] {
        Value::String(name) => name.as_str(),
        Value::Array(names) => names
            .iter()
            .filter_map(Value::as_str)
            .find(|name| *name != "null")
            .unwrap_or("any"),
        _ => "any",
    };
    match name {
        "array" => format!("list of {}", type_of(&property["items"])),
        "object" if property["additionalProperties"].is_object() => {
            format!("map of {}", type_of(&property["additionalProperties"]))
        }
        _ => name.to_owned(),
    }
}

fn cell(text: &str) -> String {
    text.split_whitespace()
        .collect::<Vec<_>>()
        .join(" ")
        .replace('|', "\\|")
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn an_enumeration_names_its_values() {
        let mut text = String::new();
        describe(&mut text, &json!({"enum": ["pods", "nodes"]}), "Per");
        assert!(text.contains("One of `pods`, `nodes`."), "{text}");
    }

    #[test]
    fn types_are_said_in_words_and_followed() {
        let schema = json!({
            "description": "The file.",
            "properties": {
                "metrics": {"description": "What is\nserved", "type": ["array", "null"], "items": {"$ref": "#/$defs/Metric"}},
                "name": {"type": "string"},
            },
            "$defs": {
                "Metric": {"properties": {"per": {"anyOf": [{"$ref": "#/$defs/Per"}, {"type": "null"}]}}},
                "Per": {"anyOf": [
                    {"type": "string", "description": "A kind."},
                    {"type": "object", "additionalProperties": {"type": "string"}, "description": "An owner. Not yet."},
                ]},
                "Unused": {"properties": {}},
            },
        });
        let page = page(&schema, "metrics: []\n");
        assert!(
            page.contains("| `metrics` | list of [Metric](#metric) | What is served |"),
            "{page}"
        );
        assert!(page.contains("| `per` | [Per](#per) |"), "{page}");
        assert!(
            page.contains("- string: A kind.\n- map of string: An owner. Not yet.\n"),
            "{page}"
        );
        assert!(!page.contains("Unused"), "{page}");
        assert!(page.contains("```yaml\nmetrics: []\n```"), "{page}");
    }
}
