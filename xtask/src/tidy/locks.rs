//! The fuzz workspace has a lock file of its own, which no build of ours reads: it must not fall behind.
//!
//! Inputs: both lock files, the normal dependencies of each member. Invariants: what both lock files name has a
//! version of ours, since fuzzing another version finds other bugs; each member has the dependencies that it has.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use anyhow::{Context as _, Result};
use cargo_metadata::{DependencyKind, Metadata};
use serde::Deserialize;

use super::Findings;

const OURS: &str = "Cargo.lock";
const FUZZ: &str = "adapter/fuzz/Cargo.lock";
/// How to mend it.
const CURE: &str = "cp Cargo.lock adapter/fuzz/ && cargo metadata --format-version 1 --manifest-path adapter/fuzz/Cargo.toml";

#[derive(Debug, Deserialize)]
struct Lock {
    package: Vec<Locked>,
}

#[derive(Debug, Deserialize)]
struct Locked {
    name: String,
    version: String,
    #[serde(default)]
    dependencies: Vec<String>,
}

/// Normal dependencies of each member, by name.
type Members = BTreeMap<String, BTreeSet<String>>;

/// Checks the repository's lock files.
pub(super) fn check(root: &Path, metadata: &Metadata, findings: &mut Findings) -> Result<()> {
    let read = |path: &str| -> Result<Lock> {
        let text = std::fs::read_to_string(root.join(path)).with_context(|| path.to_owned())?;
        toml::from_str(&text).with_context(|| path.to_owned())
    };
    let members = metadata
        .workspace_packages()
        .iter()
        .map(|package| {
            let normal = package
                .dependencies
                .iter()
                .filter(|dependency| dependency.kind == DependencyKind::Normal)
                .map(|dependency| dependency.name.clone());
            (package.name.to_string(), normal.collect())
        })
        .collect();
    for difference in differences(&read(OURS)?, &read(FUZZ)?, &members) {
        findings
            .problems
            .push(format!("{FUZZ}: {difference}; mend it by `{CURE}`"));
    }
    Ok(())
}

fn differences(ours: &Lock, fuzz: &Lock, members: &Members) -> Vec<String> {
    let mut versions: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for package in &ours.package {
        versions
            .entry(&package.name)
            .or_default()
            .insert(&package.version);
    }
    let mut found = Vec::new();
    for package in &fuzz.package {
        let Locked { name, version, .. } = package;
        if versions
            .get(name.as_str())
            .is_some_and(|known| !known.contains(version.as_str()))
        {
            found.push(format!("has {name} {version}, which we do not build"));
        }
        // An entry is a name, with the version behind it where the name alone is ambiguous.
        let locked: BTreeSet<&str> = package
            .dependencies
            .iter()
            .filter_map(|entry| entry.split(' ').next())
            .collect();
        let Some(wanted) = members.get(name) else {
            continue;
        };
        if !wanted.iter().map(String::as_str).eq(locked.iter().copied()) {
            found.push(format!("has other dependencies for {name} than its Cargo.toml"));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lock(text: &str) -> Lock {
        toml::from_str(text).unwrap()
    }

    fn found(fuzz: &str) -> Vec<String> {
        let ours = lock(
            "[[package]]\nname = \"adapter\"\nversion = \"0.1.0\"\ndependencies = [\"base64 0.22.1\", \"insta\"]\n\
             [[package]]\nname = \"base64\"\nversion = \"0.22.1\"\n",
        );
        let members = BTreeMap::from([("adapter".to_owned(), BTreeSet::from(["base64".to_owned()]))]);
        differences(&ours, &lock(fuzz), &members)
    }

    #[test]
    fn what_both_have_is_the_same() {
        let adapter = "[[package]]\nname = \"adapter\"\nversion = \"0.1.0\"\n";
        let base64 = |version: &str| format!("[[package]]\nname = \"base64\"\nversion = \"{version}\"\n");
        let own = "[[package]]\nname = \"libfuzzer-sys\"\nversion = \"0.4.13\"\n";
        let with = |dependencies: &str, version: &str| {
            found(&format!(
                "{adapter}dependencies = {dependencies}\n{}{own}",
                base64(version)
            ))
        };
        assert_eq!(with("[\"base64\"]", "0.22.1"), Vec::<String>::new());
        assert_eq!(with("[\"base64\", \"gone\"]", "0.22.1").len(), 1);
        assert_eq!(with("[]", "0.22.1").len(), 1);
        assert_eq!(with("[\"base64\"]", "0.22.0").len(), 1);
    }
}
