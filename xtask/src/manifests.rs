//! Manifests render, and say nothing that the programs do not know.
//!
//! Inputs: `manifests/` through kustomize (its path in `FOREWARM_KUSTOMIZE`), the programs' flags. Invariants:
//! an adapter configuration passes `check-config`; an APIService never skips TLS verification; images name no registry, so that users choose theirs;
//! a container of ours gets only flags that its program has.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail};
use serde_json::Value;

use crate::gobuild;
use crate::programs;
use crate::tidy::files;

/// Every problem of every manifest, one line each.
pub(crate) fn problems(root: &Path) -> Result<Vec<String>> {
    let kustomize = gobuild::kustomize(root)?;
    let manifests = root.join("manifests");
    let programs = [
        ("forewarm/exporter", programs::exporter()),
        ("forewarm/adapter", programs::adapter()),
    ];
    let mut problems = Vec::new();
    for path in files(&manifests)? {
        if path.extension().is_some_and(|extension| extension == "yaml") {
            let text =
                std::fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))?;
            let name = path.strip_prefix(root).unwrap_or(&path).display().to_string();
            match objects(&text) {
                Ok(objects) => {
                    problems.extend(objects.iter().flat_map(|object| check(&name, object, &programs)));
                }
                Err(error) => problems.push(format!("{name}: {error:#}")),
            }
            problems.extend(check_adapter_config(&name, &text));
        }
    }
    for folder in kustomizations(&manifests)? {
        let name = folder.strip_prefix(root).unwrap_or(&folder).display().to_string();
        match render(&kustomize, &manifests, &folder) {
            Ok(objects) => problems.extend(objects.iter().flat_map(|object| check(&name, object, &programs))),
            Err(error) => problems.push(format!("{name}: {error:#}")),
        }
    }
    problems.sort();
    problems.dedup();
    Ok(problems)
}

/// Folders with a kustomization.
fn kustomizations(manifests: &Path) -> Result<Vec<PathBuf>> {
    Ok(files(manifests)?
        .into_iter()
        .filter(|path| path.file_name().is_some_and(|name| name == "kustomization.yaml"))
        .filter_map(|path| path.parent().map(Path::to_owned))
        .collect())
}

/// Renders a folder; a component is rendered upon the base, because alone it has nothing to patch.
fn render(kustomize: &Path, manifests: &Path, folder: &Path) -> Result<Vec<Value>> {
    let own = std::fs::read_to_string(folder.join("kustomization.yaml")).context("kustomization.yaml")?;
    if !own.lines().any(|line| line.trim() == "kind: Component") {
        return build(kustomize, folder);
    }
    // Beside the manifests, because kustomize refuses absolute paths.
    let overlay = manifests.join(format!(".lint-{}", std::process::id()));
    let relative = folder
        .strip_prefix(manifests)
        .context("component lies outside manifests")?;
    std::fs::create_dir(&overlay).context("creating a temporary overlay")?;
    let text = format!(
        "apiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization\nresources: [../base]\ncomponents: [../{}]\n",
        relative.display()
    );
    let rendered = std::fs::write(overlay.join("kustomization.yaml"), text)
        .context("writing a temporary overlay")
        .and_then(|()| build(kustomize, &overlay));
    std::fs::remove_dir_all(&overlay).context("removing the temporary overlay")?;
    rendered
}

fn build(kustomize: &Path, folder: &Path) -> Result<Vec<Value>> {
    let output = Command::new(kustomize)
        .arg("build")
        .arg(folder)
        .output()
        .with_context(|| format!("{} did not start", kustomize.display()))?;
    if !output.status.success() {
        bail!(
            "kustomize refuses it: {}",
            String::from_utf8_lossy(&output.stderr).trim()
        );
    }
    objects(&String::from_utf8_lossy(&output.stdout))
}

fn objects(text: &str) -> Result<Vec<Value>> {
    let documents: Vec<Value> = serde_saphyr::from_multiple(text).context("not YAML that we can read")?;
    Ok(documents
        .into_iter()
        .filter(|document| !document.is_null())
        .collect())
}

fn check(file: &str, object: &Value, programs: &[(&str, clap::Command)]) -> Vec<String> {
    let named = format!(
        "{file}: {} {}",
        object["kind"].as_str().unwrap_or("object"),
        object["metadata"]["name"].as_str().unwrap_or("without name")
    );
    let mut problems = Vec::new();
    walk(object, &mut |key, value| match key {
        "insecureSkipTLSVerify" if *value == Value::Bool(true) => {
            problems.push(format!("{named}: insecureSkipTLSVerify lets anybody answer for us; set caBundle (`forewarm-adapter certs`)"));
        }
        "containers" | "initContainers" => {
            for container in value.as_array().into_iter().flatten() {
                problems.extend(
                    check_container(container, programs)
                        .into_iter()
                        .map(|problem| format!("{named}: {problem}")),
                );
            }
        }
        _ => {}
    });
    problems
}

/// A file of kind AdapterConfig must be one that the adapter takes, without a warning.
fn check_adapter_config(file: &str, text: &str) -> Vec<String> {
    if !text.lines().any(|line| line.trim() == "kind: AdapterConfig") {
        return Vec::new();
    }
    match forewarm_adapter::config::parse(file, text, forewarm_adapter::config::Options::default()) {
        Ok(config) => config
            .warnings
            .iter()
            .map(|warning| format!("{file}: {}: {}", warning.path, warning.cause))
            .collect(),
        Err(rejected) => vec![rejected.to_string()],
    }
}

fn walk<'a>(value: &'a Value, visit: &mut impl FnMut(&'a str, &'a Value)) {
    match value {
        Value::Object(fields) => fields.iter().for_each(|(key, field)| {
            visit(key, field);
            walk(field, visit);
        }),
        Value::Array(items) => items.iter().for_each(|item| walk(item, visit)),
        _ => {}
    }
}

fn check_container(container: &Value, programs: &[(&str, clap::Command)]) -> Vec<String> {
    let mut problems = Vec::new();
    let image = container["image"].as_str().unwrap_or_default();
    let ours = image.contains("forewarm/");
    if ours && !image.starts_with("forewarm/") {
        problems.push(format!("image {image} names a registry; leave it to an overlay"));
    }
    if image.ends_with(":latest") {
        problems.push(format!(
            "image {image}: what `latest` is changes under a running fleet"
        ));
    }
    let name = image.split(['@', ':']).next().unwrap_or(image);
    let Some((_, command)) = programs.iter().find(|(program, _)| *program == name) else {
        if ours {
            problems.push(format!("image {image} is no program of ours"));
        }
        return problems;
    };
    let args: Vec<&str> = container["args"]
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(Value::as_str)
        .collect();
    problems.extend(unknown_flags(command, &args));
    problems
}

/// Flags and subcommands that the program does not have.
fn unknown_flags(command: &clap::Command, args: &[&str]) -> Vec<String> {
    let mut current = command.clone();
    current.build();
    let mut inherited: Vec<String> = Vec::new();
    let mut problems = Vec::new();
    let mut value_follows = false;
    for arg in args {
        if std::mem::take(&mut value_follows) {
            continue;
        }
        let Some(flag) = arg.strip_prefix("--") else {
            let next = current.find_subcommand(arg).cloned();
            match next {
                Some(subcommand) => {
                    inherited.extend(
                        current
                            .get_arguments()
                            .filter(|a| a.is_global_set())
                            .filter_map(|a| a.get_long().map(str::to_owned)),
                    );
                    current = subcommand;
                }
                None if current.get_positionals().next().is_none() => {
                    problems.push(format!("{} has no subcommand {arg}", current.get_name()));
                }
                None => {}
            }
            continue;
        };
        let name = flag.split('=').next().unwrap_or(flag);
        let known = current.get_arguments().find(|a| a.get_long() == Some(name));
        if known.is_none() && !inherited.iter().any(|long| long == name) {
            problems.push(format!("{} has no flag --{name}", current.get_name()));
        }
        value_follows = !flag.contains('=') && known.is_some_and(|a| a.get_action().takes_values());
    }
    problems
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::{Arg, ArgAction};
    use serde_json::json;

    fn programs() -> [(&'static str, clap::Command); 1] {
        let command = clap::Command::new("forewarm-exporter")
            .arg(Arg::new("listen").long("listen"))
            .arg(Arg::new("quiet").long("quiet").action(ArgAction::SetTrue))
            .arg(Arg::new("log").long("log").global(true))
            .subcommand(clap::Command::new("once").arg(Arg::new("output").long("output")));
        [("forewarm/exporter", command)]
    }

    fn pod(image: &str, args: &[&str]) -> Value {
        json!({"kind": "Pod", "metadata": {"name": "p"}, "spec": {"containers": [{"image": image, "args": args}]}})
    }

    fn found(object: &Value) -> Vec<String> {
        check("file", object, &programs())
    }

    #[test]
    fn known_flags_pass() {
        let args = [
            "--listen=$(POD_IP):9410",
            "--quiet",
            "--log",
            "json",
            "once",
            "--output=json",
            "--log=text",
        ];
        assert_eq!(found(&pod("forewarm/exporter", &args)), Vec::<String>::new());
        assert_eq!(
            found(&pod("example.com/other:v1", &["--anything"])),
            Vec::<String>::new()
        );
    }

    #[test]
    fn unknown_flags_and_subcommands_are_named() {
        let problems = found(&pod("forewarm/exporter", &["--lissten=x", "twice"]));
        assert_eq!(problems.len(), 2, "{problems:?}");
        assert!(problems[0].contains("no flag --lissten"), "{problems:?}");
        assert!(problems[1].contains("no subcommand twice"), "{problems:?}");
    }

    #[test]
    fn adapter_configurations_are_checked() {
        let text = |field: &str| format!("apiVersion: forewarm.dev/v1alpha1\nkind: AdapterConfig\n{field}\n");
        assert_eq!(check_adapter_config("file", &text("")), Vec::<String>::new());
        assert!(check_adapter_config("file", &text("metricks: []"))[0].contains("metricks"));
        assert_eq!(
            check_adapter_config("file", "kind: Deployment\n"),
            Vec::<String>::new()
        );
    }

    #[test]
    fn images_are_ours_without_a_registry_and_known() {
        assert_eq!(found(&pod("forewarm/exporter:0.1.0", &[])), Vec::<String>::new());
        assert!(found(&pod("forewarm/exporter:latest", &[]))[0].contains("latest"));
        assert!(found(&pod("registry.example.com/forewarm/exporter", &[]))[0].contains("registry"));
        assert!(found(&pod("forewarm/sidecar", &[]))[0].contains("no program of ours"));
    }

    #[test]
    fn skipping_tls_verification_is_refused_in_both_spellings_of_a_boolean() {
        let service = |skip: bool| json!({"kind": "APIService", "metadata": {"name": "a"}, "spec": {"insecureSkipTLSVerify": skip}});
        assert_eq!(found(&service(true)).len(), 1);
        assert_eq!(found(&service(false)).len(), 0);
    }
}
