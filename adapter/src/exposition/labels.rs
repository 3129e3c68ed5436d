//! The label set of a sample or exemplar, from after `{` to after `}`.
//!
//! Invariants: a key appears once; values keep commas, braces and quotes; only `\\`, `\"` and `\n` are escapes,
//! anything else is refused rather than guessed.

use std::borrow::Cow;

use super::Label;
use super::line::Cursor;

/// Why a label set cannot be read.
#[derive(Debug)]
pub(super) enum LabelError {
    /// It breaks the grammar.
    Grammar(String),
}

/// Labels a sample may have: more is a mistake in the target, and the check for repeated keys is quadratic.
const MAX_LABELS: usize = 64;

/// Reads labels into `out`. `relaxed` allows blanks and a comma before `}`, as text 0.0.4 does.
pub(super) fn read<'b>(
    cursor: &mut Cursor<'b>,
    relaxed: bool,
    out: &mut Vec<Label<'b>>,
) -> Result<(), LabelError> {
    let grammar = |cause: String| Err(LabelError::Grammar(cause));
    cursor.skip_blanks();
    if cursor.byte() == Some(b'}') {
        cursor.at += 1;
        return Ok(());
    }
    loop {
        let Some(key) = cursor.label_name() else {
            return grammar(format!("expected a label name, found {}", cursor.rest_shown()));
        };
        if out.iter().any(|label| label.key == key) {
            return grammar(format!("label {key} is given twice"));
        }
        if out.len() == MAX_LABELS {
            return grammar(format!("more than {MAX_LABELS} labels"));
        }
        cursor.skip_blanks();
        if cursor.byte() != Some(b'=') {
            return grammar(format!(
                "expected '=' after label {key}, found {}",
                cursor.rest_shown()
            ));
        }
        cursor.at += 1;
        cursor.skip_blanks();
        if cursor.byte() != Some(b'"') {
            return grammar(format!(
                "label {key}: expected '\"', found {}",
                cursor.rest_shown()
            ));
        }
        cursor.at += 1;
        let value = match value(cursor) {
            Ok(value) => value,
            Err(cause) => return grammar(format!("label {key}: {cause}")),
        };
        out.push(Label { key, value });
        cursor.skip_blanks();
        match cursor.byte() {
            Some(b'}') => {
                cursor.at += 1;
                return Ok(());
            }
            Some(b',') => {
                cursor.at += 1;
                cursor.skip_blanks();
                if relaxed && cursor.byte() == Some(b'}') {
                    cursor.at += 1;
                    return Ok(());
                }
            }
            _ => {
                return grammar(format!(
                    "expected ',' or '}}' after label {key}, found {}",
                    cursor.rest_shown()
                ));
            }
        }
    }
}

/// A value from after its opening quote to after its closing one.
fn value<'b>(cursor: &mut Cursor<'b>) -> Result<Cow<'b, str>, String> {
    let bytes = cursor.line.as_bytes();
    let from = cursor.at;
    let mut at = from;
    // Values are short (names, UUIDs): a plain loop beats the start-up cost of a vector search.
    while at < bytes.len() && bytes[at] != b'"' && bytes[at] != b'\\' {
        at += 1;
    }
    if bytes.get(at) == Some(&b'"') {
        cursor.at = at + 1;
        return Ok(Cow::Borrowed(&cursor.line[from..at]));
    }
    let mut owned = cursor.line[from..at].to_owned();
    while at < bytes.len() {
        match bytes[at] {
            b'"' => {
                cursor.at = at + 1;
                return Ok(Cow::Owned(owned));
            }
            b'\\' => {
                owned.push(match bytes.get(at + 1) {
                    Some(b'\\') => '\\',
                    Some(b'"') => '"',
                    Some(b'n') => '\n',
                    Some(_) => return Err("only \\\\, \\\" and \\n may follow a backslash".to_owned()),
                    None => return Err("the value ends in the middle of an escape".to_owned()),
                });
                at += 2;
            }
            _ => {
                let run = at;
                while at < bytes.len() && bytes[at] != b'"' && bytes[at] != b'\\' {
                    at += 1;
                }
                owned.push_str(&cursor.line[run..at]);
            }
        }
    }
    Err("the closing quote is missing".to_owned())
}
