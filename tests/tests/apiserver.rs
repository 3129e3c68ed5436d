//! The apiserver level: real etcd, API server, controllers and scheduler, simulated GPU nodes, and the
//! real exporter and adapter installed from the very manifests that users apply.
//!
//! One process, one control plane: trials share a [`fixture::Fixture`] whose parts start when the first
//! trial asks for them, and each trial has its own namespace. Trials that disturb the shared parts run alone.
//! Nothing outlives the process, see [`forewarm_tests::contain`].
//!
//! To add trials: a module under `apiserver/` with `pub(crate) fn cases() -> Vec<Case>`, listed in [`cases`].

#![allow(
    clippy::expect_used,
    clippy::print_stderr,
    reason = "clippy exempts test functions only, and this program is all test: what it prints is its report"
)]

#[path = "apiserver/api_certs.rs"]
mod api_certs;
#[path = "apiserver/api_discovery.rs"]
mod api_discovery;
#[path = "apiserver/api_identity.rs"]
mod api_identity;
#[path = "apiserver/control_plane.rs"]
mod control_plane;
#[path = "apiserver/driver_faults.rs"]
mod driver_faults;
#[path = "apiserver/faults.rs"]
mod faults;
#[path = "apiserver/fixture.rs"]
mod fixture;
#[path = "apiserver/forger.rs"]
mod forger;
#[path = "apiserver/hpa.rs"]
mod hpa;
#[path = "apiserver/manifests.rs"]
mod manifests;
#[path = "apiserver/nodes.rs"]
mod nodes;
#[path = "apiserver/serving.rs"]
mod serving;
#[path = "apiserver/source_faults.rs"]
mod source_faults;
#[path = "apiserver/stack.rs"]
mod stack;
#[path = "apiserver/victim.rs"]
mod victim;

use std::process::ExitCode;
use std::sync::Arc;

use forewarm_tests::contain::{self, Role};
use forewarm_tests::netns;
use forewarm_tests::simnode::launcher;
use libtest_mimic::{Arguments, Trial};

use fixture::{Case, Fixture};

/// Trials at a time: most of them wait most of the time.
const THREADS: usize = 12;

fn cases() -> Vec<Case> {
    let mut cases: Vec<Case> = [
        // The longest first, so that the others run beside them.
        hpa::cases(),
        faults::cases(),
        driver_faults::cases(),
        source_faults::cases(),
        api_certs::cases(),
        api_discovery::cases(),
        api_identity::cases(),
        control_plane::cases(),
        nodes::cases(),
        manifests::cases(),
    ]
    .into_iter()
    .flatten()
    .collect();
    // Those that run alone come last: each waits for all that run beside each other.
    cases.sort_by_key(|case| case.disturbs);
    cases
}

fn main() -> ExitCode {
    // Before arguments are looked at: a simulated container is this binary with other arguments.
    if let Some(code) = launcher::run_if_asked() {
        return code;
    }
    let mut arguments = Arguments::from_args();
    arguments.test_threads.get_or_insert(THREADS);
    if arguments.list {
        return libtest_mimic::run(&arguments, trials(None)).exit_code();
    }
    match contain::enter() {
        Ok(Role::Outer(code)) => return code,
        Ok(Role::Inner) => {}
        Err(error) => return give_up(&error),
    }
    if let Err(error) = netns::enter() {
        return give_up(&error);
    }
    let folder = match Fixture::folder() {
        Ok(folder) => folder,
        Err(error) => return give_up(&error),
    };
    let path = folder.path().to_owned();
    let interrupted = contain::at_interrupt(move || {
        let _ = std::fs::remove_dir_all(path);
    });
    if let Err(error) = interrupted {
        return give_up(&error);
    }
    let fixture = Arc::new(Fixture::new());
    let conclusion = libtest_mimic::run(&arguments, trials(Some(&fixture)));
    fixture.shut_down();
    drop(folder);
    conclusion.exit_code()
}

/// The level's missing prerequisite is an error: a level that did not run has proven nothing.
fn give_up(error: &dyn std::error::Error) -> ExitCode {
    eprintln!("the apiserver level cannot run: {error}");
    ExitCode::FAILURE
}

fn trials(fixture: Option<&Arc<Fixture>>) -> Vec<Trial> {
    cases()
        .into_iter()
        .map(|case| {
            let fixture = fixture.cloned();
            Trial::test(case.name, move || match fixture {
                Some(fixture) => fixture.run(&case).map_err(Into::into),
                None => Ok(()),
            })
        })
        .collect()
}
