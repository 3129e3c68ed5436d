//! Bans, licences and sources of all dependencies, from the same `deny.toml` that cargo-deny reads.
//!
//! Inputs: `deny.toml` and `cargo metadata`. Invariants: only what is listed is allowed; each exception carries
//! a reason; nothing needs the internet. cargo-deny itself is not required, because compiling it would cost a
//! cold CI run more than all our other checks; `--advisories` asks it, for a nightly job on a machine that reaches
//! the database of advisories.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use anyhow::{Context as _, Result, bail};
use cargo_metadata::{Metadata, Package};
use serde::Deserialize;

use crate::lint::none;
use crate::repository::{cargo, metadata_for, run};
use crate::spdx;

/// Arguments of `cargo xtask deny`.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct DenyArgs {
    /// Ask an installed cargo-deny: the same checks by it, then its database of advisories, fetched from the internet.
    #[arg(long)]
    advisories: bool,
}

/// Checks by ourselves, or by cargo-deny with advisories.
pub(crate) fn deny(root: &Path, args: &DenyArgs) -> Result<()> {
    none(&problems(root)?)?;
    if !args.advisories {
        return Ok(());
    }
    let cargo_deny = |words: &[&str]| run(cargo(root).args(["deny", "--locked"]).args(words));
    if cargo(root)
        .args(["deny", "--version"])
        .output()
        .is_ok_and(|output| !output.status.success())
    {
        bail!("cargo-deny is not installed, so no advisory was checked: cargo install cargo-deny --locked");
    }
    cargo_deny(&["check", "bans", "licenses", "sources"])?;
    cargo_deny(&["fetch", "db"])
        .context("the database of advisories is out of reach, so none was checked")?;
    cargo_deny(&["check", "--disable-fetch", "advisories"])
}

/// The part of cargo-deny's format that we use.
#[derive(Debug, Deserialize)]
struct Config {
    graph: Graph,
    bans: Bans,
    licenses: Licenses,
    sources: Sources,
}

/// The targets that count: crates for others are never compiled.
#[derive(Debug, Deserialize)]
struct Graph {
    targets: Vec<String>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Bans {
    #[serde(default)]
    deny: Vec<Named>,
    #[serde(default)]
    skip: Vec<Named>,
}

/// `{ crate = "name" }` or `{ crate = "name@1.2" }` with a reason.
#[derive(Debug, Deserialize)]
struct Named {
    #[serde(rename = "crate")]
    krate: String,
    reason: String,
}

#[derive(Debug, Deserialize)]
struct Licenses {
    allow: Vec<String>,
    #[serde(default)]
    exceptions: Vec<LicenseException>,
}

#[derive(Debug, Deserialize)]
struct LicenseException {
    #[serde(rename = "crate")]
    krate: String,
    allow: Vec<String>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Sources {
    allow_registry: Vec<String>,
}

/// Everything that `deny.toml` refuses, one line each.
pub(crate) fn problems(root: &Path) -> Result<Vec<String>> {
    let path = root.join("deny.toml");
    let text = std::fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))?;
    let config: Config = toml::from_str(&text).context("deny.toml")?;
    let metadata = metadata_for(root, &config.graph.targets)?;
    Ok(check(&config, &metadata))
}

fn check(config: &Config, metadata: &Metadata) -> Vec<String> {
    let packages: Vec<Facts> = metadata.packages.iter().map(Facts::of).collect();
    check_facts(config, &packages)
}

/// What is checked about one package.
#[derive(Debug, Clone)]
struct Facts {
    name: String,
    version: String,
    license: Option<String>,
    /// None for members of the workspace.
    source: Option<String>,
}

impl Facts {
    fn of(package: &Package) -> Self {
        Self {
            name: package.name.to_string(),
            version: package.version.to_string(),
            license: package.license.clone(),
            source: package.source.as_ref().map(|source| source.repr.clone()),
        }
    }

    fn is(&self, named: &str) -> bool {
        match named.split_once('@') {
            Some((name, version)) => {
                self.name == name
                    && (self.version == version || self.version.starts_with(&format!("{version}.")))
            }
            None => self.name == named,
        }
    }
}

fn check_facts(config: &Config, packages: &[Facts]) -> Vec<String> {
    let mut problems = Vec::new();
    for package in packages {
        let Facts { name, version, .. } = package;
        for ban in config.bans.deny.iter().filter(|ban| package.is(&ban.krate)) {
            problems.push(format!("{name} {version} is banned: {}", ban.reason));
        }
        let exceptions = config
            .licenses
            .exceptions
            .iter()
            .filter(|exception| package.is(&exception.krate));
        let accepted: Vec<String> = config
            .licenses
            .allow
            .iter()
            .chain(exceptions.flat_map(|exception| &exception.allow))
            .cloned()
            .collect();
        match &package.license {
            Some(license) if spdx::is_accepted(license, &accepted) => {}
            Some(license) => problems.push(format!(
                "{name} {version} has licence {license:?}, which is not allowed"
            )),
            None => problems.push(format!("{name} {version} names no licence")),
        }
        if let Some(source) = &package.source {
            let known = config
                .sources
                .allow_registry
                .iter()
                .any(|registry| source.strip_prefix("registry+") == Some(registry));
            if !known {
                problems.push(format!(
                    "{name} {version} comes from {source}, which is not an allowed source"
                ));
            }
        }
    }
    problems.extend(duplicates(config, packages));
    problems.extend(stale_skips(config, packages));
    problems
}

/// Two versions of a crate are compiled twice and may hold two copies of one state.
fn duplicates(config: &Config, packages: &[Facts]) -> Vec<String> {
    let mut versions: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for package in packages {
        let skipped = config.bans.skip.iter().any(|skip| package.is(&skip.krate));
        if !skipped {
            versions
                .entry(&package.name)
                .or_default()
                .insert(&package.version);
        }
    }
    versions
        .iter()
        .filter(|(_, versions)| versions.len() > 1)
        .map(|(name, versions)| {
            let versions: Vec<&str> = versions.iter().copied().collect();
            format!(
                "{name} is here in {} versions ({})",
                versions.len(),
                versions.join(", ")
            )
        })
        .collect()
}

/// A skip that matches nothing, or the only version there is, is a reason that no longer holds.
fn stale_skips(config: &Config, packages: &[Facts]) -> Vec<String> {
    config
        .bans
        .skip
        .iter()
        .filter_map(|skip| {
            let name = skip.krate.split('@').next().unwrap_or(&skip.krate);
            let versions: BTreeSet<&str> = packages
                .iter()
                .filter(|package| package.name == name)
                .map(|package| package.version.as_str())
                .collect();
            let why = if !packages.iter().any(|package| package.is(&skip.krate)) {
                "is not in the tree"
            } else if versions.len() == 1 {
                "is the only version in the tree"
            } else {
                return None;
            };
            Some(format!(
                "deny.toml skips {}, which {why} ({})",
                skip.krate, skip.reason
            ))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const CONFIG: &str = r#"
        [graph]
        targets = ["x86_64-unknown-linux-gnu"]
        [bans]
        deny = [{ crate = "openssl", reason = "needs C" }]
        skip = [{ crate = "syn@1", reason = "old macro crates" }]
        [licenses]
        allow = ["MIT", "Apache-2.0"]
        exceptions = [{ crate = "ring", allow = ["ISC"] }]
        [sources]
        allow-registry = ["https://index"]
    "#;

    fn facts(name: &str, version: &str, license: Option<&str>, source: Option<&str>) -> Facts {
        Facts {
            name: name.to_owned(),
            version: version.to_owned(),
            license: license.map(str::to_owned),
            source: source.map(str::to_owned),
        }
    }

    fn found(packages: &[Facts]) -> Vec<String> {
        let mut all = vec![
            facts("syn", "1.0.9", Some("MIT"), Some("registry+https://index")),
            facts("syn", "2.0.0", Some("MIT"), Some("registry+https://index")),
        ];
        all.extend_from_slice(packages);
        check_facts(&toml::from_str(CONFIG).unwrap(), &all)
    }

    #[test]
    fn a_clean_tree_has_no_problem() {
        let packages = [
            facts(
                "serde",
                "1.0.0",
                Some("MIT OR Apache-2.0"),
                Some("registry+https://index"),
            ),
            facts(
                "ring",
                "0.17.0",
                Some("Apache-2.0 AND ISC"),
                Some("registry+https://index"),
            ),
            facts("member", "0.1.0", Some("Apache-2.0"), None),
        ];
        assert_eq!(found(&packages), Vec::<String>::new());
    }

    #[test]
    fn each_kind_of_problem_is_named() {
        let cases = [
            (
                facts("openssl", "0.1.0", Some("MIT"), Some("registry+https://index")),
                "needs C",
            ),
            (
                facts("gpl", "1.0.0", Some("GPL-3.0"), Some("registry+https://index")),
                "GPL-3.0",
            ),
            (
                facts("bare", "1.0.0", None, Some("registry+https://index")),
                "no licence",
            ),
            (
                facts("fork", "1.0.0", Some("MIT"), Some("git+https://somewhere")),
                "git+https://somewhere",
            ),
            (
                facts("ring2", "1.0.0", Some("ISC"), Some("registry+https://index")),
                "ISC",
            ),
        ];
        for (package, wanted) in cases {
            let problems = found(&[package]);
            assert_eq!(problems.len(), 1, "{problems:?}");
            assert!(problems[0].contains(wanted), "{problems:?}");
        }
    }

    #[test]
    fn duplicates_need_a_skip_and_skips_must_match() {
        let twice = [
            facts("http", "0.2.0", Some("MIT"), Some("registry+https://index")),
            facts("http", "1.0.0", Some("MIT"), Some("registry+https://index")),
        ];
        assert!(found(&twice)[0].contains("http is here in 2 versions (0.2.0, 1.0.0)"));
        let stale = check_facts(&toml::from_str(CONFIG).unwrap(), &[]);
        assert!(stale[0].contains("syn@1, which is not in the tree"), "{stale:?}");
        let alone = [facts("syn", "1.0.9", Some("MIT"), None)];
        let stale = check_facts(&toml::from_str(CONFIG).unwrap(), &alone);
        assert!(stale[0].contains("syn@1, which is the only version"), "{stale:?}");
    }
}
