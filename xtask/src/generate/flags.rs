//! `docs/reference/cli-*.md` from the programs' own command definitions.
//!
//! Inputs: a clap command. Invariants: every visible flag and subcommand appears with its environment twin
//! and its default; the text does not depend on the environment it is generated in.

use std::fmt::Write as _;

use clap::{Arg, ArgAction, Command};

use super::Generated;

/// The reference of one program.
pub(super) fn reference(part: &str, command: &Command) -> Generated {
    let mut command = command.clone();
    command.build();
    let mut text = format!(
        "# {}\n\nGenerated from the program's flags by `make generate`; do not edit.\n",
        command.get_name()
    );
    describe(&mut text, &command, command.get_name(), 2);
    Generated::new(format!("docs/reference/cli-{part}.md"), text)
}

fn describe(text: &mut String, command: &Command, path: &str, level: usize) {
    if let Some(about) = command.get_long_about().or(command.get_about()) {
        let _infallible = writeln!(text, "\n{}", about.to_string().trim());
    }
    let subcommands: Vec<&Command> = command
        .get_subcommands()
        .filter(|subcommand| !subcommand.is_hide_set() && subcommand.get_name() != "help")
        .collect();
    let positionals: Vec<&Arg> = command
        .get_positionals()
        .filter(|arg| !arg.is_hide_set())
        .collect();
    let flags: Vec<&Arg> = command
        .get_opts()
        .chain(command.get_arguments().filter(|arg| is_switch(arg)))
        .filter(|arg| !arg.is_hide_set() && (level == 2 || !arg.is_global_set()))
        .collect();
    if !positionals.is_empty() {
        text.push_str("\n| argument | meaning |\n|---|---|\n");
        for arg in positionals {
            let _infallible = writeln!(text, "| `{}` | {} |", value_name(arg), meaning(arg));
        }
    }
    if !flags.is_empty() {
        text.push_str("\n| flag | environment | default | meaning |\n|---|---|---|---|\n");
        for arg in flags {
            let _infallible = writeln!(
                text,
                "| `{}` | {} | {} | {} |",
                spelling(arg),
                arg.get_env()
                    .map(|name| format!("`{}`", name.to_string_lossy()))
                    .unwrap_or_default(),
                default(arg),
                meaning(arg)
            );
        }
    }
    for subcommand in subcommands {
        let path = format!("{path} {}", subcommand.get_name());
        let _infallible = writeln!(text, "\n{} `{path}`", "#".repeat(level));
        describe(text, subcommand, &path, level + 1);
    }
}

fn is_switch(arg: &Arg) -> bool {
    !arg.is_positional()
        && matches!(
            arg.get_action(),
            ArgAction::SetTrue | ArgAction::SetFalse | ArgAction::Count
        )
}

fn spelling(arg: &Arg) -> String {
    let long = arg.get_long().map(|long| format!("--{long}"));
    let name = long
        .or_else(|| arg.get_short().map(|short| format!("-{short}")))
        .unwrap_or_default();
    if is_switch(arg) {
        name
    } else {
        format!("{name} {}", value_name(arg))
    }
}

fn value_name(arg: &Arg) -> String {
    arg.get_value_names().map_or_else(
        || arg.get_id().as_str().to_uppercase(),
        |names| {
            names
                .iter()
                .map(|name| name.as_str())
                .collect::<Vec<_>>()
                .join(" ")
        },
    )
}

fn default(arg: &Arg) -> String {
    if is_switch(arg) {
        return String::new();
    }
    let values: Vec<String> = arg
        .get_default_values()
        .iter()
        .map(|value| format!("`{}`", value.to_string_lossy()))
        .collect();
    values.join(", ")
}

fn meaning(arg: &Arg) -> String {
    let help = arg
        .get_long_help()
        .or(arg.get_help())
        .map(ToString::to_string)
        .unwrap_or_default();
    let mut text = help
        .split_whitespace()
        .collect::<Vec<_>>()
        .join(" ")
        .replace('|', "\\|");
    let values: Vec<String> = arg
        .get_possible_values()
        .iter()
        .filter(|value| !value.is_hide_set())
        .map(|value| format!("`{}`", value.get_name()))
        .collect();
    if !values.is_empty() && !is_switch(arg) {
        let _infallible = write!(text, " ({})", values.join(", "));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn command() -> Command {
        Command::new("forewarm-thing")
            .about("Does a thing")
            .arg(
                Arg::new("listen")
                    .long("listen")
                    .env("THING_LISTEN")
                    .default_value("[::]:1")
                    .help("Where to | listen"),
            )
            .arg(
                Arg::new("quiet")
                    .long("quiet")
                    .action(ArgAction::SetTrue)
                    .help("Say less"),
            )
            .arg(Arg::new("secret").long("secret").hide(true))
            .subcommand(
                Command::new("once")
                    .about("One round")
                    .arg(Arg::new("output").long("output").value_parser(["text", "json"])),
            )
    }

    #[test]
    fn flags_twins_defaults_and_subcommands_appear() {
        let text = reference("thing", &command()).text;
        assert!(
            text.contains("| `--listen LISTEN` | `THING_LISTEN` | `[::]:1` | Where to \\| listen |"),
            "{text}"
        );
        assert!(text.contains("| `--quiet` |  |  | Say less |"), "{text}");
        assert!(text.contains("## `forewarm-thing once`"), "{text}");
        assert!(text.contains("(`text`, `json`)"), "{text}");
        assert!(!text.contains("secret"), "{text}");
    }
}
