//! `forewarm-adapter`: installs the crypto provider and calls the library.

use std::process::ExitCode;

fn main() -> ExitCode {
    forewarm_runtime::install_crypto();
    forewarm_runtime::exit::finish(forewarm_adapter::run::main())
}
