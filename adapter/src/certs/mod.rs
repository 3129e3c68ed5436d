//! The serving certificate that the adapter makes for itself.
//!
//! Purpose: a cluster without cert-manager gets a verified aggregated API: one Secret holds a CA and a serving
//! certificate for all replicas, and the CA stands in the APIServices.
//! Inputs: the Secret, the three APIServices, the clock.
//! Invariants: [`plan`] decides and is pure, the rest does; a replica that loses the race for the Secret adopts
//! what the winner wrote; an APIService that points elsewhere is left alone; a new CA is trusted everywhere
//! before a certificate of it is served; `insecureSkipTLSVerify` is never set.
//!
//! ```text
//!  Secret ─► held ─┐                    ┌─► Secret (create or replace, else adopt)
//!                  ├─► plan ─► material ─┼─► caBundle of our APIServices
//!  APIServices ────┘                    └─► served certificate, files
//! ```

mod manage;
mod material;
pub mod plan;
mod registration;
mod secret;

pub use manage::{Manager, Metrics, Round, ServedCert, ensure_once};

/// Names of what is managed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settings {
    /// Secret.
    pub secret: String,
    /// Service that the APIServices point to.
    pub service: String,
}

/// Why a round of certificate management failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The API server refused or could not be asked.
    #[error("{action}")]
    Api {
        /// What was tried, with the object's name and the verb that it needs.
        action: String,
        /// What came back.
        #[source]
        source: Box<kube::Error>,
    },
    /// Other replicas kept changing the Secret.
    #[error("the Secret kept changing under us, {0} times in a row")]
    Contended(u32),
    /// A key or certificate could not be made.
    #[error("making a certificate")]
    Make(#[source] rcgen::Error),
    /// What was made or found cannot be served.
    #[error("the certificate cannot be served: {0}")]
    Unusable(String),
    /// Files could not be written.
    #[error("writing {path}")]
    Write {
        /// The file.
        path: std::path::PathBuf,
        /// What the system said.
        #[source]
        source: std::io::Error,
    },
}
