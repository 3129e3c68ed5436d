//! `cargo xtask generate`: files that are derived from code, written or checked.
//!
//! Inputs: the vocabulary, the programs' flags, the config types, the protos. Invariants: a file is a pure
//! function of the code, so a check compares texts; with `--check` nothing is written and the difference is
//! shown.

mod codemap;
mod flags;
mod metrics;
mod protos;
mod schema;

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};

use crate::programs;
use crate::report::note;

/// Arguments of `cargo xtask generate`.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct GenerateArgs {
    /// Write nothing; fail if a file differs from what would be written.
    #[arg(long)]
    check: bool,
}

/// A file to be, by its path from the root.
pub(crate) struct Generated {
    pub(crate) path: PathBuf,
    pub(crate) text: String,
}

impl Generated {
    pub(crate) fn new(path: impl Into<PathBuf>, text: String) -> Self {
        Self {
            path: path.into(),
            text,
        }
    }
}

/// Writes or checks every generated file.
pub(crate) fn generate(root: &Path, args: &GenerateArgs) -> Result<()> {
    let mut differing = Vec::new();
    for file in everything(root)? {
        let path = root.join(&file.path);
        let old = std::fs::read_to_string(&path).unwrap_or_default();
        if old == file.text {
            continue;
        }
        let name = file.path.display().to_string();
        if args.check {
            note(format!("{name} differs from what the code says:"));
            difference(&old, &file.text).iter().for_each(note);
            differing.push(name);
        } else {
            if let Some(folder) = path.parent() {
                std::fs::create_dir_all(folder).with_context(|| format!("creating {}", folder.display()))?;
            }
            std::fs::write(&path, &file.text).with_context(|| format!("writing {name}"))?;
            note(format!("wrote {name}"));
        }
    }
    if differing.is_empty() {
        Ok(())
    } else {
        bail!("run `make generate` and commit: {}", differing.join(", "))
    }
}

fn everything(root: &Path) -> Result<Vec<Generated>> {
    let mut files = vec![
        codemap::reference(root)?,
        metrics::reference(),
        flags::reference("exporter", &programs::exporter()),
        flags::reference("adapter", &programs::adapter()),
    ];
    files.extend(schema::reference(
        &forewarm_adapter::config::schema(),
        forewarm_adapter::config::DEFAULTS,
    )?);
    files.extend(
        protos::files(root)?
            .into_iter()
            .map(|(path, text)| Generated::new(path, text)),
    );
    Ok(files)
}

/// The first lines that differ, as `-old` and `+new`; enough to see what happened.
fn difference(old: &str, new: &str) -> Vec<String> {
    const SHOWN: usize = 20;
    let (old, new): (Vec<&str>, Vec<&str>) = (old.lines().collect(), new.lines().collect());
    let same_head = old.iter().zip(&new).take_while(|(a, b)| a == b).count();
    let same_tail = old[same_head..]
        .iter()
        .rev()
        .zip(new[same_head..].iter().rev())
        .take_while(|(a, b)| a == b)
        .count();
    let mut lines = vec![format!("@@ line {}", same_head + 1)];
    let removed = &old[same_head..old.len() - same_tail];
    let added = &new[same_head..new.len() - same_tail];
    lines.extend(removed.iter().take(SHOWN).map(|line| format!("-{line}")));
    lines.extend(added.iter().take(SHOWN).map(|line| format!("+{line}")));
    if removed.len() > SHOWN || added.len() > SHOWN {
        lines.push(format!(
            "… {} lines removed, {} added in all",
            removed.len(),
            added.len()
        ));
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_difference_shows_what_changed_only() {
        assert_eq!(difference("a\nb\nc\n", "a\nx\nc\n"), ["@@ line 2", "-b", "+x"]);
        assert_eq!(difference("", "a\n"), ["@@ line 1", "+a"]);
        let long: String = (0..50).map(|n| format!("{n}\n")).collect();
        assert!(difference("", &long).last().unwrap().contains("50 added"));
    }
}
