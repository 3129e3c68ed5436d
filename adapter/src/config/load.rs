//! From a file's text to a checked configuration.
//!
//! Invariants: syntax, unknown fields and meaning are looked at in one pass over the file, so that its author
//! sees every complaint at once. Unknown fields are refused with their path and the nearest known name;
//! `lenient` turns those, and only those, into warnings, so that a rollback can read a newer file.

use std::path::Path;

use super::{Complaint, Config, Rejected, raw, resolve};

/// How a file is read.
#[derive(Debug, Clone, Copy, Default)]
pub struct Options {
    /// Unknown fields are warnings.
    pub lenient: bool,
    /// There is no cluster to discover targets in.
    pub standalone: bool,
}

/// Reads and checks a file.
///
/// # Errors
/// Everything that is wrong with it.
pub fn load(path: &Path, options: Options) -> Result<Config, Rejected> {
    let file = path.display().to_string();
    let text = std::fs::read_to_string(path).map_err(|error| Rejected {
        file: file.clone(),
        complaints: vec![Complaint {
            path: String::new(),
            cause: format!("cannot be read: {error}"),
            cure: String::new(),
        }],
    })?;
    parse(&file, &text, options)
}

/// The parser's first line without its advice to programmers, and the cure where the mistake is a known one.
fn unreadable(error: &str) -> (String, &'static str) {
    let line = error.lines().next().unwrap_or_default();
    let line = line.strip_prefix("error: ").unwrap_or(line);
    let cut = ["; use from_str", ", set DuplicateKeyPolicy"]
        .iter()
        .filter_map(|advice| line.find(advice))
        .min()
        .unwrap_or(line.len());
    let line = line.get(..cut).unwrap_or(line);
    let cure = if line.contains("duplicate mapping key") {
        "give each key once"
    } else if line.contains("multiple YAML documents") {
        "one document a file: remove what follows ---"
    } else if line.contains("budget breached") {
        "the file is too large once its aliases are expanded"
    } else if line.contains("non-finite") {
        "write a finite number"
    } else {
        ""
    };
    (format!("cannot be read as YAML: {line}"), cure)
}

/// Checks a file's text; `file` is its name in complaints.
///
/// # Errors
/// Everything that is wrong with it.
pub fn parse(file: &str, text: &str, options: Options) -> Result<Config, Rejected> {
    let rejected = |complaints| Rejected {
        file: file.to_owned(),
        complaints,
    };
    let whole = |cause: String, cure: &str| {
        rejected(vec![Complaint {
            path: String::new(),
            cause,
            cure: cure.to_owned(),
        }])
    };
    let value: serde_json::Value =
        serde_saphyr::from_str_with_options(text, serde_saphyr::options! { strict_booleans: true }).map_err(
            |error| {
                let (cause, cure) = unreadable(&error.to_string());
                whole(cause, cure)
            },
        )?;
    if !value.is_object() {
        return Err(whole(
            "is empty or not a map".to_owned(),
            "start with apiVersion: forewarm.dev/v1alpha1",
        ));
    }

    let mut unknown = Vec::new();
    let mut track = serde_path_to_error::Track::new();
    let deserializer = serde_path_to_error::Deserializer::new(&value, &mut track);
    let read: Result<raw::AdapterConfig, _> =
        serde_ignored::deserialize(deserializer, |path| unknown.push(dotted(&path)));
    let known = known_fields();
    let mut unknown: Vec<Complaint> = unknown
        .into_iter()
        .map(|path| {
            let field = path.rsplit('.').next().unwrap_or_default().to_owned();
            Complaint {
                cause: "unknown field".to_owned(),
                cure: nearest(&field, known.iter().map(String::as_str))
                    .map_or_else(|| "remove it".to_owned(), |name| format!("did you mean {name}?")),
                path,
            }
        })
        .collect();

    let mut warnings = Vec::new();
    if options.lenient {
        warnings.append(&mut unknown);
    }
    let mut complaints = unknown;
    match read {
        Err(error) => {
            let path = track.path().to_string();
            complaints.push(Complaint {
                path: if path == "." { String::new() } else { path },
                cause: error.to_string(),
                cure: String::new(),
            });
        }
        Ok(raw) => match resolve::resolve(&raw, options) {
            Ok(mut config) if complaints.is_empty() => {
                config.warnings.append(&mut warnings);
                return Ok(config);
            }
            Ok(_) => {}
            Err(mut found) => complaints.append(&mut found),
        },
    }
    Err(rejected(complaints))
}

/// The JSON schema of a file, for the reference.
#[must_use]
pub fn schema() -> serde_json::Value {
    serde_json::Value::from(schemars::schema_for!(raw::AdapterConfig))
}

/// `metrics[2].window.length` from serde_ignored's path.
fn dotted(path: &serde_ignored::Path<'_>) -> String {
    use serde_ignored::Path;
    match path {
        Path::Root => String::new(),
        Path::Seq { parent, index } => format!("{}[{index}]", dotted(parent)),
        Path::Map { parent, key } => {
            let parent = dotted(parent);
            if parent.is_empty() {
                key.clone()
            } else {
                format!("{parent}.{key}")
            }
        }
        Path::Some { parent } | Path::NewtypeStruct { parent } | Path::NewtypeVariant { parent } => {
            dotted(parent)
        }
    }
}

/// Every field name of the format, out of its schema.
fn known_fields() -> Vec<String> {
    fn collect(value: &serde_json::Value, out: &mut Vec<String>) {
        match value {
            serde_json::Value::Object(map) => {
                if let Some(serde_json::Value::Object(properties)) = map.get("properties") {
                    out.extend(properties.keys().cloned());
                }
                map.values().for_each(|value| collect(value, out));
            }
            serde_json::Value::Array(values) => values.iter().for_each(|value| collect(value, out)),
            _ => {}
        }
    }
    let mut fields = Vec::new();
    collect(&schema(), &mut fields);
    fields.sort_unstable();
    fields.dedup();
    fields
}

/// The known name that is closest to `name`, where one is close enough to be meant.
pub(super) fn nearest<'a>(name: &str, known: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let lower = name.to_lowercase();
    known
        .map(|candidate| (distance(&lower, &candidate.to_lowercase()), candidate))
        .filter(|(distance, candidate)| *distance <= candidate.len().max(3) / 3)
        .min_by_key(|(distance, candidate)| (*distance, std::cmp::Reverse(candidate.len())))
        .map(|(_, candidate)| candidate)
}

/// Levenshtein distance.
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, from) in a.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, to) in b.iter().enumerate() {
            let replaced = diagonal + usize::from(from != *to);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(diagonal + 1).min(row[j] + 1);
        }
    }
    row[b.len()]
}
