//! `docs/reference/code-map.md`: every file with the first line of its module head.
//!
//! Inputs: the sources. Invariants: each file appears once, under its member; the words are the file's own, so
//! the map cannot say something else than the code.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;

use anyhow::{Context as _, Result};

use super::Generated;
use crate::tidy::files;

/// Members by folder, in reading order; the longest matching folder wins.
const MEMBERS: [&str; 8] = [
    "signals",
    "runtime",
    "exporter",
    "exporter/nvml",
    "adapter",
    "tests",
    "tests/fake-nvml",
    "xtask",
];

/// The map of the whole tree.
pub(super) fn reference(root: &Path) -> Result<Generated> {
    let mut heads = BTreeMap::new();
    for path in files(root)? {
        let Ok(relative) = path.strip_prefix(root) else {
            continue;
        };
        let name = relative.to_string_lossy().into_owned();
        if name.ends_with(".rs") && !name.contains("/generated/") {
            let text = std::fs::read_to_string(&path).with_context(|| format!("reading {name}"))?;
            heads.insert(name, first_sentence(&text));
        }
    }
    Ok(Generated::new("docs/reference/code-map.md", page(&heads)))
}

fn page(heads: &BTreeMap<String, String>) -> String {
    let mut text = String::from(
        "# Code map\n\nGenerated from the module heads by `make generate`; do not edit. \
         [ARCHITECTURE.md](../../ARCHITECTURE.md) says how the parts work together.\n",
    );
    for member in MEMBERS {
        let _infallible = writeln!(text, "\n## {member}\n\n| file | what it is |\n|---|---|");
        for (path, head) in heads.iter().filter(|(path, _)| member_of(path) == Some(member)) {
            let short = path.strip_prefix(&format!("{member}/")).unwrap_or(path);
            let _infallible = writeln!(text, "| [{short}](../../{path}) | {} |", head.replace('|', "\\|"));
        }
    }
    text
}

fn member_of(path: &str) -> Option<&'static str> {
    MEMBERS
        .into_iter()
        .filter(|member| path.starts_with(&format!("{member}/")))
        .max_by_key(|member| member.len())
}

/// The first paragraph of the head.
fn first_sentence(text: &str) -> String {
    let lines: Vec<&str> = text
        .lines()
        .skip_while(|line| !line.starts_with("//!"))
        .map_while(|line| line.strip_prefix("//!"))
        .map(str::trim)
        .take_while(|line| !line.is_empty())
        .collect();
    let paragraph = lines.join(" ");
    match paragraph.find(". ") {
        Some(end) => paragraph[..=end].to_owned(),
        None => paragraph,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_sentence_of_the_head_is_taken() {
        assert_eq!(
            first_sentence("//! One thing: this\n//! and that. More.\n//!\n//! Inputs.\nuse x;\n"),
            "One thing: this and that."
        );
        assert_eq!(first_sentence("//! Short.\nuse x;\n"), "Short.");
    }

    #[test]
    fn a_file_belongs_to_its_innermost_member() {
        assert_eq!(member_of("exporter/nvml/src/lib.rs"), Some("exporter/nvml"));
        assert_eq!(member_of("exporter/src/lib.rs"), Some("exporter"));
        let heads = BTreeMap::from([("tests/fake-nvml/src/a.rs".to_owned(), "The | fake.".to_owned())]);
        assert!(page(&heads).contains("| [src/a.rs](../../tests/fake-nvml/src/a.rs) | The \\| fake. |"));
    }
}
