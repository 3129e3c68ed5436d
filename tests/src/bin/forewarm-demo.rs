//! `forewarm-demo`: see [`forewarm_tests::demo`].

fn main() -> std::process::ExitCode {
    forewarm_tests::demo::main()
}
