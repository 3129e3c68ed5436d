//! Developer tasks behind the Makefile: `cargo xtask TASK`.
//!
//! Inputs: the repository that this binary was built in. Invariants: the Makefile holds no logic, this does;
//! without feature `programs` it compiles in seconds, and runs itself again with it where the programs' own
//! definitions are needed.

mod bench;
mod dashboards;
mod demo;
mod deny;
mod fuzz;
#[cfg(feature = "programs")]
mod generate;
mod gobuild;
mod levels;
mod libtest;
mod lint;
#[cfg(feature = "programs")]
mod manifests;
#[cfg(feature = "programs")]
mod programs;
mod promql;
mod report;
mod repository;
mod spdx;
mod tidy;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Developer tasks. `make` lists the same ones.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
struct Cli {
    #[command(subcommand)]
    task: Task,
}

#[derive(Debug, Subcommand)]
enum Task {
    /// Run the whole loop with simulated GPU nodes and watch it scale.
    ///
    /// Builds the programs and, once, a real Kubernetes control plane from Go modules. CONTROL_PLANE=none runs
    /// the exporter and the adapter alone, in seconds. Everything after `demo` goes to the demo itself.
    Demo(demo::DemoArgs),
    /// Run the unit, process and apiserver levels, as CI does.
    ///
    /// unit: no I/O. process: real binaries, a fake NVML, loopback. apiserver: a real etcd, kube-apiserver,
    /// controller manager and scheduler. The last line on stdout is one JSON object with what was run.
    /// For one test: `cargo xtask test --level process -- part_of_its_name`.
    Test(levels::TestArgs),
    /// Run the node and cluster levels against real peers.
    TestCluster,
    /// Measure against the budgets; figures as JSON lines on stdout, a table on stderr.
    Bench(bench::BenchArgs),
    /// Check formatting, lints, structure, dependencies, generated files, manifests and dashboards.
    Lint,
    /// Check structure only: crate edges, names, file budget, module heads, leaks of machines and hosts.
    Tidy,
    /// Check bans, licences and sources of dependencies only, from deny.toml; advisories too, if asked.
    Deny(deny::DenyArgs),
    /// Write the files that are derived from code; with --check, fail if they differ.
    Generate(Generate),
    /// Throw random bodies at the exposition readers for a while; the corpus stays in the cache folder.
    Fuzz(fuzz::FuzzArgs),
    /// Check the alert rules and what they say with a real promtool.
    ///
    /// Not a part of lint: promtool is built once, which takes minutes.
    Alerts,
    /// Find or build the control plane and kustomize, and print where they are.
    Controlplane,
    /// Check the rendered manifests against the programs (part of lint).
    #[command(hide = true)]
    Manifests,
}

#[cfg(feature = "programs")]
use generate::GenerateArgs as Generate;

/// The same arguments where the generator is not compiled in.
#[cfg(not(feature = "programs"))]
#[derive(Debug, Clone, clap::Args)]
struct Generate {
    /// Write nothing; fail if a file differs from what would be written.
    #[arg(long)]
    check: bool,
}

fn main() -> ExitCode {
    match run(Cli::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            report::note(format!("error: {error:#}"));
            ExitCode::FAILURE
        }
    }
}

fn run(cli: Cli) -> anyhow::Result<()> {
    let root = repository::root()?;
    match cli.task {
        Task::Demo(args) => demo::demo(&root, &args),
        Task::Test(args) => levels::test(&root, &args),
        Task::TestCluster => levels::test_cluster(&root),
        Task::Bench(args) => bench::bench(&root, &args),
        Task::Lint => lint::lint(&root),
        Task::Tidy => lint::none(&tidy::problems(&root)?),
        Task::Deny(args) => deny::deny(&root, &args),
        Task::Fuzz(args) => fuzz::fuzz(&root, &args),
        Task::Alerts => dashboards::alerts(&root),
        Task::Generate(args) => with_programs::generate(&root, &args),
        Task::Controlplane => {
            let kustomize = gobuild::kustomize(&root)?;
            match gobuild::control_plane(&root)? {
                gobuild::Found::Folder(folder) => report::result(folder.display()),
                gobuild::Found::Path => report::result("PATH"),
            }
            report::result(kustomize.display());
            Ok(())
        }
        Task::Manifests => with_programs::manifests(&root),
    }
}

/// The tasks that need the programs, done here.
#[cfg(feature = "programs")]
mod with_programs {
    use std::path::Path;

    pub(crate) use crate::generate::generate;
    use crate::lint::none;

    pub(crate) fn manifests(root: &Path) -> anyhow::Result<()> {
        none(&crate::manifests::problems(root)?)
    }
}

/// The tasks that need the programs, done by this program with them compiled in.
#[cfg(not(feature = "programs"))]
mod with_programs {
    use std::path::Path;

    use crate::repository::{run, xtask_with_programs};

    pub(crate) fn generate(root: &Path, args: &crate::Generate) -> anyhow::Result<()> {
        let check: &[&str] = if args.check {
            &["generate", "--check"]
        } else {
            &["generate"]
        };
        run(&mut xtask_with_programs(root, check)?)
    }

    pub(crate) fn manifests(root: &Path) -> anyhow::Result<()> {
        run(&mut xtask_with_programs(root, &["manifests"])?)
    }
}
