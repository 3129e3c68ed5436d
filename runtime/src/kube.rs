//! The Kubernetes client of a program: kubeconfig or in-cluster, named, with timeouts.
//!
//! Inputs: `--kubeconfig` or the pod's service account. Invariants: knows nothing of the kinds that are
//! watched; the user agent names the program, so API server audit logs can be read.

use std::path::PathBuf;
use std::time::Duration;

use http::HeaderValue;
use http::header::USER_AGENT;
use kube::config::{Config, KubeConfigOptions, Kubeconfig};

/// A dead API server address is noticed within this time.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Longer than the 290 s after which the API server itself ends the watches of the kube crate, so that a
/// quiet watch is not cut by us, while a dead one is.
const READ_TIMEOUT: Duration = Duration::from_secs(295);
/// A request that cannot be written in this time goes to a dead peer.
const WRITE_TIMEOUT: Duration = Duration::from_secs(30);

/// Client flags, made for flattening into a program's arguments.
#[derive(Debug, Clone, Default, clap::Args)]
#[command(next_help_heading = "Kubernetes")]
pub struct ClientArgs {
    /// Kubeconfig of the cluster; the pod's own service account when absent.
    #[arg(long, env = "FOREWARM_KUBECONFIG", value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,
}

/// Why there is no client.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// The kubeconfig cannot be read or used.
    #[error("kubeconfig {path}")]
    Kubeconfig {
        /// The file.
        path: PathBuf,
        /// What the kube crate said.
        #[source]
        source: kube::config::KubeconfigError,
    },
    /// No kubeconfig was given and this is no pod.
    #[error("no --kubeconfig and no service account of a pod")]
    InCluster(#[source] kube::config::InClusterError),
    /// The client cannot be built from its configuration.
    #[error("kube client")]
    Build(#[source] kube::Error),
}

/// The configuration that [`client`] uses, for callers that need its address or namespace.
///
/// # Errors
/// [`ClientError`] as in [`client`].
pub async fn config(args: &ClientArgs, user_agent: &str) -> Result<Config, ClientError> {
    let mut config = match &args.kubeconfig {
        Some(path) => {
            let named = |source| ClientError::Kubeconfig {
                path: path.clone(),
                source,
            };
            let file = Kubeconfig::read_from(path).map_err(named)?;
            Config::from_custom_kubeconfig(file, &KubeConfigOptions::default())
                .await
                .map_err(named)?
        }
        None => Config::incluster().map_err(ClientError::InCluster)?,
    };
    config.connect_timeout = Some(CONNECT_TIMEOUT);
    config.read_timeout = Some(READ_TIMEOUT);
    config.write_timeout = Some(WRITE_TIMEOUT);
    if let Ok(value) = HeaderValue::from_str(user_agent) {
        config.headers.push((USER_AGENT, value));
    }
    Ok(config)
}

/// A client for the cluster that the arguments name. Does not connect yet.
///
/// # Errors
/// [`ClientError`] when the configuration is absent or unusable.
pub async fn client(args: &ClientArgs, user_agent: &str) -> Result<kube::Client, ClientError> {
    let config = config(args, user_agent).await?;
    kube::Client::try_from(config).map_err(ClientError::Build)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::exit::chain;

    const KUBECONFIG: &str = "
apiVersion: v1
kind: Config
current-context: here
contexts: [{name: here, context: {cluster: here, user: me, namespace: team}}]
clusters: [{name: here, cluster: {server: 'http://127.0.0.1:1'}}]
users: [{name: me, user: {token: t}}]
";

    #[tokio::test]
    async fn a_kubeconfig_is_used_and_the_program_named() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("kubeconfig");
        std::fs::write(&path, KUBECONFIG).unwrap();
        let args = ClientArgs {
            kubeconfig: Some(path),
        };
        let config = config(&args, "forewarm-test/1").await.unwrap();
        assert_eq!(config.cluster_url.port_u16(), Some(1));
        assert_eq!(config.default_namespace, "team");
        assert!(
            config
                .headers
                .iter()
                .any(|(name, value)| name == USER_AGENT && value == "forewarm-test/1")
        );
        crate::install_crypto();
        assert!(client(&args, "forewarm-test/1").await.is_ok());
    }

    #[tokio::test]
    async fn a_missing_kubeconfig_is_named() {
        let args = ClientArgs {
            kubeconfig: Some("/nonexistent/kubeconfig".into()),
        };
        let error = config(&args, "x").await.unwrap_err();
        assert!(
            chain(&error).contains("/nonexistent/kubeconfig"),
            "{}",
            chain(&error)
        );
    }
}
