//! Command line of `forewarm-adapter`: what was typed, then what it means.
//!
//! Purpose: [`Args`] mirrors flags and environment; [`Args::resolve`] makes checked settings of them.
//! Inputs: arguments and environment twins.
//! Invariants: parsing touches nothing; all bad settings are reported together; what is refused names its cure.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Parser, Subcommand};
use forewarm_runtime::admin::AdminArgs;
use forewarm_runtime::exit::{Problems, UsageError};
use forewarm_runtime::kube::ClientArgs;
use forewarm_runtime::listen::ListenAddr;
use forewarm_runtime::logs::LogArgs;

use crate::certs;
use crate::config;
use crate::config::check::Output;

const EXAMPLE: &str = "\
On a laptop, with exporters listed as targets in the file:
  forewarm-adapter --standalone --config adapter.yaml
  curl 'localhost:6443/apis/custom.metrics.k8s.io/v1beta2/namespaces/NS/pods/*/gpu_busy_percent'
  curl 'localhost:9411/readyz?verbose'";

/// Port of the metrics API where none is given.
const PORT: u16 = 6443;
/// The kubelet kills after 30 s by default; what is left of that is for draining.
const MAX_SHUTDOWN_DELAY: Duration = Duration::from_secs(60);

/// Serves GPU metrics to the HPA controller as custom.metrics.k8s.io and external.metrics.k8s.io.
///
/// Scrapes the exporters named in the configuration, keeps the newest values in memory with the time they were
/// measured, and answers from there. Values that are too old are absent, with the reason in the answer.
///
/// In a cluster it needs no flag but --config: it serves with a certificate that it makes and renews itself,
/// kept in one Secret, and registers its CA in the APIServices.
#[derive(Debug, Parser)]
#[command(name = "forewarm-adapter", version, after_long_help = EXAMPLE)]
pub struct Args {
    /// What to do instead of serving.
    #[command(subcommand)]
    pub command: Option<Sub>,

    /// Flags of the server.
    #[command(flatten)]
    pub run: RunArgs,

    /// Where the cluster is.
    #[command(flatten)]
    pub kube: ClientArgs,

    /// Admin endpoints.
    #[command(flatten)]
    pub admin: AdminArgs,

    /// Logs.
    #[command(flatten)]
    pub logs: LogArgs,
}

/// Flags of the server as typed.
#[derive(Debug, Clone, clap::Args)]
pub struct RunArgs {
    /// Configuration file (kind AdapterConfig). Changes are taken up while running; a bad file is refused, with
    /// the reason, and the old one stays in force.
    #[arg(long, env = "FOREWARM_ADAPTER_CONFIG", value_name = "FILE")]
    pub config: Option<PathBuf>,

    /// Warn about unknown fields of the configuration instead of refusing them, for a rollback to this version.
    #[arg(long, env = "FOREWARM_ADAPTER_LENIENT")]
    pub lenient: bool,

    /// Address of the metrics API; port 0 lets the kernel choose. [default: [::]:6443, with --standalone
    /// 127.0.0.1:6443]
    #[arg(long, env = "FOREWARM_ADAPTER_LISTEN", value_name = "HOST:PORT")]
    pub listen: Option<String>,

    /// Serving certificate chain (PEM), re-read when it changes. Without it, and outside --standalone, the
    /// adapter makes and renews its own (see --certs-secret).
    #[arg(long, env = "FOREWARM_ADAPTER_TLS_CERT", value_name = "FILE")]
    pub tls_cert: Option<PathBuf>,

    /// Key of --tls-cert (PEM).
    #[arg(long, env = "FOREWARM_ADAPTER_TLS_KEY", value_name = "FILE")]
    pub tls_key: Option<PathBuf>,

    /// Run without an API server: everybody who can connect may read, pods are those that the exporters report,
    /// and the API is served without TLS unless --tls-cert is given. Listens on loopback only.
    #[arg(long, env = "FOREWARM_ADAPTER_STANDALONE")]
    pub standalone: bool,

    /// How long requests are still taken after SIGTERM turned readiness off, so that the cluster can send them
    /// elsewhere.
    #[arg(
        long,
        env = "FOREWARM_ADAPTER_SHUTDOWN_DELAY",
        default_value = "5s",
        value_name = "DURATION"
    )]
    pub shutdown_delay: String,

    /// The adapter's own namespace, where exporters are looked for and its Secret and Service are. [default:
    /// POD_NAMESPACE, else that of the service account or kubeconfig]
    #[arg(long, env = "FOREWARM_ADAPTER_NAMESPACE", value_name = "NAME")]
    pub namespace: Option<String>,

    /// Names of the managed certificate.
    #[command(flatten)]
    pub certs: CertsArgs,
}

/// Names of the managed certificate as typed.
#[derive(Debug, Clone, clap::Args)]
#[command(next_help_heading = "Managed certificate")]
pub struct CertsArgs {
    /// Secret that holds CA and serving certificate for all replicas; created if absent.
    #[arg(
        long,
        env = "FOREWARM_ADAPTER_CERTS_SECRET",
        default_value = "forewarm-adapter-certs",
        value_name = "NAME"
    )]
    pub certs_secret: String,

    /// Service that the APIServices point to; the certificate is for <name>.<namespace>.svc.
    #[arg(
        long,
        env = "FOREWARM_ADAPTER_CERTS_SERVICE",
        default_value = "forewarm-adapter",
        value_name = "NAME"
    )]
    pub certs_service: String,
}

/// Subcommands as typed.
#[derive(Debug, Subcommand)]
pub enum Sub {
    /// Check a configuration file and show what is made of it; touches neither cluster nor targets.
    CheckConfig {
        /// The file.
        #[arg(value_name = "FILE")]
        file: PathBuf,
        /// Warn about unknown fields instead of refusing them.
        #[arg(long)]
        lenient: bool,
        /// As for an adapter with --standalone.
        #[arg(long)]
        standalone: bool,
        /// For people or programs.
        #[arg(long, value_enum, default_value_t)]
        output: Output,
    },
    /// Make or renew the serving certificate once: the Secret, the caBundle of the three APIServices, and
    /// optionally files. The server does all this by itself; this is for init containers and for repairs.
    Certs {
        /// Names.
        #[command(flatten)]
        certs: CertsArgs,
        /// The adapter's namespace. [default: POD_NAMESPACE, else that of the service account or kubeconfig]
        #[arg(long, env = "FOREWARM_ADAPTER_NAMESPACE", value_name = "NAME")]
        namespace: Option<String>,
        /// Directory to write ca.crt, tls.crt and tls.key to.
        #[arg(long, value_name = "DIR")]
        write: Option<PathBuf>,
        /// Where the cluster is.
        #[command(flatten)]
        kube: ClientArgs,
        /// Logs.
        #[command(flatten)]
        logs: LogArgs,
    },
}

/// Checked settings.
#[derive(Debug)]
pub enum Command {
    /// Serve.
    Run(Box<Run>),
    /// Check a file.
    CheckConfig {
        /// The file.
        file: PathBuf,
        /// How it is read.
        options: config::Options,
        /// For people or programs.
        output: Output,
    },
    /// Make the certificate once.
    Certs {
        /// Names.
        names: certs::Settings,
        /// Namespace, where given.
        namespace: Option<String>,
        /// Directory to write files to.
        write: Option<PathBuf>,
        /// Where the cluster is.
        kube: ClientArgs,
        /// Logs.
        logs: LogArgs,
    },
}

/// Checked settings of a serving adapter.
#[derive(Debug)]
pub struct Run {
    /// The server itself.
    pub server: ServerSettings,
    /// Address of the admin endpoints.
    pub admin: ListenAddr,
    /// Where the cluster is; `None` with `--standalone`.
    pub cluster: Option<ClientArgs>,
    /// The adapter's own namespace, where given.
    pub namespace: Option<String>,
    /// Logs.
    pub logs: LogArgs,
}

/// Checked settings of the server.
#[derive(Debug)]
pub struct ServerSettings {
    /// Configuration file.
    pub config: PathBuf,
    /// How it is read.
    pub options: config::Options,
    /// Address of the metrics API.
    pub listen: ListenAddr,
    /// How it is served.
    pub serving: Serving,
    /// Time between readiness off and the end of listening.
    pub shutdown_delay: Duration,
}

/// Where the serving certificate comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Serving {
    /// No TLS: loopback only.
    Plain,
    /// Files, re-read.
    Files {
        /// Chain.
        cert: PathBuf,
        /// Key.
        key: PathBuf,
    },
    /// Made, shared and renewed by the adapter.
    Managed(certs::Settings),
}

impl Args {
    /// Checks everything.
    ///
    /// # Errors
    /// All bad settings together.
    pub fn resolve(self, pod_namespace: Option<String>) -> Result<Command, UsageError> {
        let mut problems = Problems::new();
        // A bad setting is noted and stands in for by a default until `finish` refuses the whole.
        let command = match self.command {
            Some(Sub::CheckConfig {
                file,
                lenient,
                standalone,
                output,
            }) => Command::CheckConfig {
                file,
                options: config::Options { lenient, standalone },
                output,
            },
            Some(Sub::Certs {
                certs,
                namespace,
                write,
                kube,
                logs,
            }) => {
                logs.check(&mut problems);
                check_name("--namespace", namespace.as_deref(), &mut problems);
                Command::Certs {
                    names: certs.resolve(&mut problems),
                    namespace: namespace.or(pod_namespace),
                    write,
                    kube,
                    logs,
                }
            }
            None => {
                self.logs.check(&mut problems);
                let admin = self.admin.resolve(&mut problems);
                let namespace = self.run.namespace.clone().or(pod_namespace);
                let run = self.run.resolve(&mut problems);
                Command::Run(Box::new(Run {
                    namespace,
                    admin: admin.unwrap_or(ListenAddr::any(0)),
                    cluster: (!run.options.standalone).then_some(self.kube),
                    logs: self.logs,
                    server: run,
                }))
            }
        };
        problems.finish()?;
        Ok(command)
    }
}

impl RunArgs {
    fn resolve(self, problems: &mut Problems) -> ServerSettings {
        check_name("--namespace", self.namespace.as_deref(), problems);
        if self.config.is_none() {
            problems.add(
                "--config",
                "is needed: the file that says what is scraped and which metrics are made of it",
            );
        }
        let listen = match self.listen {
            Some(text) => problems.check("--listen", text.parse::<ListenAddr>()),
            None if self.standalone => Some(ListenAddr::loopback(PORT)),
            None => Some(ListenAddr::any(PORT)),
        };
        let names = self.certs.resolve(problems);
        let serving = match (self.tls_cert, self.tls_key) {
            (Some(cert), Some(key)) => Serving::Files { cert, key },
            (None, None) if self.standalone => Serving::Plain,
            (None, None) => Serving::Managed(names),
            (Some(_), None) => {
                problems.add("--tls-key", "is needed together with --tls-cert");
                Serving::Plain
            }
            (None, Some(_)) => {
                problems.add("--tls-cert", "is needed together with --tls-key");
                Serving::Plain
            }
        };
        if let Some(listen) = &listen
            && self.standalone
            && serving == Serving::Plain
            && !listen.is_loopback()
        {
            problems.add(
                "--listen",
                "with --standalone nobody is asked who they are, so only a loopback address is served without \
                 TLS: use 127.0.0.1:6443, or give --tls-cert and --tls-key",
            );
        }
        let delay = self
            .shutdown_delay
            .parse::<jiff::SignedDuration>()
            .map_err(|error| format!("\"{}\" is no duration such as 5s: {error}", self.shutdown_delay))
            .and_then(|delay| {
                Duration::try_from(delay)
                    .ok()
                    .filter(|delay| *delay <= MAX_SHUTDOWN_DELAY)
                    .ok_or_else(|| format!("must be from 0 to {} s", MAX_SHUTDOWN_DELAY.as_secs()))
            });
        ServerSettings {
            config: self.config.unwrap_or_default(),
            options: config::Options {
                lenient: self.lenient,
                standalone: self.standalone,
            },
            listen: listen.unwrap_or(ListenAddr::loopback(PORT)),
            serving,
            shutdown_delay: problems.check("--shutdown-delay", delay).unwrap_or_default(),
        }
    }
}

impl CertsArgs {
    fn resolve(self, problems: &mut Problems) -> certs::Settings {
        check_name("--certs-secret", Some(&self.certs_secret), problems);
        check_name("--certs-service", Some(&self.certs_service), problems);
        certs::Settings {
            secret: self.certs_secret,
            service: self.certs_service,
        }
    }
}

fn check_name(flag: &str, name: Option<&str>, problems: &mut Problems) {
    if let Some(name) = name
        && !is_object_name(name)
    {
        problems.add(flag, format!("\"{name}\" is no name of a Kubernetes object"));
    }
}

/// A DNS subdomain, as names of Secrets, Services and namespaces are.
fn is_object_name(name: &str) -> bool {
    let inner = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    !name.is_empty()
        && name.len() <= 253
        && name
            .bytes()
            .all(|byte| inner(byte) || byte == b'-' || byte == b'.')
        && name.bytes().next().is_some_and(inner)
        && name.bytes().last().is_some_and(inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resolve(args: &[&str]) -> Result<Command, UsageError> {
        let all = std::iter::once("forewarm-adapter").chain(args.iter().copied());
        Args::try_parse_from(all).unwrap().resolve(None)
    }

    fn run(args: &[&str]) -> Run {
        match resolve(args).unwrap() {
            Command::Run(run) => *run,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn in_a_cluster_only_the_configuration_is_needed() {
        let run = run(&["--config", "c.yaml"]);
        assert_eq!(run.server.listen, ListenAddr::any(6443));
        assert!(run.cluster.is_some());
        assert_eq!(run.server.shutdown_delay, Duration::from_secs(5));
        let Serving::Managed(names) = run.server.serving else {
            panic!()
        };
        assert_eq!(
            (names.secret.as_str(), names.service.as_str()),
            ("forewarm-adapter-certs", "forewarm-adapter")
        );
    }

    #[test]
    fn files_win_over_the_managed_certificate() {
        let run = run(&["--config", "c", "--tls-cert", "a", "--tls-key", "b"]);
        assert_eq!(
            run.server.serving,
            Serving::Files {
                cert: "a".into(),
                key: "b".into()
            }
        );
    }

    #[test]
    fn standalone_is_plain_on_loopback() {
        let run = run(&["--config", "c", "--standalone"]);
        assert!(run.server.listen.is_loopback() && run.cluster.is_none());
        assert_eq!(run.server.serving, Serving::Plain);
    }

    #[test]
    fn standalone_on_other_addresses_needs_tls_and_says_so() {
        let error = resolve(&["--config", "c", "--standalone", "--listen", "0.0.0.0:6443"]).unwrap_err();
        assert!(error.to_string().contains("--tls-cert"), "{error}");
        let with_tls = [
            "--config",
            "c",
            "--standalone",
            "--listen",
            "[::]:1",
            "--tls-cert",
            "a",
            "--tls-key",
            "b",
        ];
        assert!(resolve(&with_tls).is_ok());
    }

    #[test]
    fn all_bad_settings_are_listed_together() {
        let error = resolve(&[
            "--listen",
            "nonsense",
            "--tls-cert",
            "a",
            "--shutdown-delay",
            "soon",
            "--certs-secret",
            "No Name",
            "--log-format",
            "xml",
            "--admin-listen",
            "x",
        ])
        .unwrap_err();
        let text = error.to_string();
        for flag in [
            "--config",
            "--listen",
            "--tls-key",
            "--shutdown-delay",
            "--certs-secret",
            "--log-format",
            "--admin-listen",
        ] {
            assert!(text.contains(flag), "{flag} in {text}");
        }
    }

    #[test]
    fn the_definition_of_the_command_line_is_sound() {
        use clap::CommandFactory as _;
        Args::command().debug_assert();
    }

    /// Every flag has an environment twin, so that a manifest can set it either way.
    #[test]
    fn every_flag_of_the_server_has_an_environment_twin() {
        use clap::CommandFactory as _;
        for argument in Args::command().get_arguments() {
            if let Some(long) = argument.get_long()
                && !matches!(long, "help" | "version")
            {
                let twin = argument.get_env().map(|name| name.to_string_lossy().into_owned());
                let tail = long.replace('-', "_").to_uppercase();
                assert!(
                    twin.as_ref().is_some_and(|name| name.ends_with(&tail)),
                    "{long}: {twin:?}"
                );
            }
        }
    }
}
