//! The adapter's configuration: what is scraped, and which metrics are made of it.
//!
//! Purpose: from a file of kind `AdapterConfig` to a checked value that the rest of the adapter can follow
//! without further doubts.
//! Inputs: a YAML file, re-read while running.
//! Invariants: [`raw`] mirrors the file and nothing else; [`Config`] holds only what has been checked. All
//! complaints about a file are reported together, each with its path, cause and cure. A file that does not pass
//! never replaces one that did.

pub mod check;
mod load;
pub mod raw;
mod resolve;
mod scalar;
pub mod watch;

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

pub use load::{Options, load, parse, schema};

/// The defaults that stand where a file leaves `sources`, `metrics` or `external` out.
pub const DEFAULTS: &str = include_str!("defaults.yaml");

/// A checked configuration.
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    /// Where samples come from.
    pub sources: Vec<Source>,
    /// Custom metrics.
    pub metrics: Vec<Metric>,
    /// External metrics.
    pub external: Vec<External>,
    /// What is legal but probably not meant.
    pub warnings: Vec<Complaint>,
}

/// A group of targets that are scraped alike.
#[derive(Debug, Clone, PartialEq)]
pub struct Source {
    /// Name that metrics refer to.
    pub name: Arc<str>,
    /// Which targets there are.
    pub targets: Targets,
    /// `https` where true.
    pub tls: Option<Tls>,
    /// Path of the exposition.
    pub path: String,
    /// User and password file.
    pub basic_auth: Option<BasicAuth>,
    /// File with a bearer token, re-read.
    pub bearer_token_file: Option<PathBuf>,
    /// Time between two scrapes of a target.
    pub interval: Duration,
    /// Longest time for one scrape.
    pub timeout: Duration,
    /// Largest body, in bytes.
    pub max_body_bytes: usize,
    /// Most samples in one body.
    pub max_series: usize,
    /// Whether to ask for the needed families only (`name[]=`).
    pub name_filter: bool,
}

/// Which targets a source has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Targets {
    /// Pods of one namespace, found by a watch.
    Pods {
        /// Namespace; the adapter's own where `None`.
        namespace: Option<String>,
        /// Label selector, as written.
        selector: String,
        /// Name of the container port.
        port: String,
    },
    /// A fixed list.
    Static(Vec<StaticTarget>),
}

/// A target that the file names.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct StaticTarget {
    /// `host:port`.
    pub address: String,
    /// Node that it reports about, where known.
    pub node: Option<String>,
}

/// How a target's certificate is verified and ours presented.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Tls {
    /// Roots to trust; required for private CAs.
    pub ca_file: Option<PathBuf>,
    /// Name that the certificate must carry, where it is not the address.
    pub server_name: Option<String>,
    /// Client certificate and its key.
    pub client: Option<(PathBuf, PathBuf)>,
}

/// HTTP basic authentication.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BasicAuth {
    /// User name.
    pub username: String,
    /// File with the password, re-read.
    pub password_file: PathBuf,
}

/// One custom metric.
#[derive(Debug, Clone, PartialEq)]
pub struct Metric {
    /// Name in the API.
    pub name: Arc<str>,
    /// Source of its series.
    pub source: Arc<str>,
    /// What it is made of.
    pub series: Series,
    /// Labels that are summed over.
    pub sum: Vec<String>,
    /// Factor from the series' unit to the metric's.
    pub scale: f64,
    /// What kind of object it describes.
    pub per: Per,
    /// Which pods are served.
    pub pods: PodFilter,
    /// How a pod's devices become one value.
    pub across_devices: Across,
    /// What a share is relative to.
    pub relative_to: RelativeTo,
    /// Smoothing or rate; the newest reading where `None`.
    pub window: Option<Window>,
    /// How old a value may be, by how it was obtained.
    pub max_age: MaxAge,
}

/// The series behind a metric.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Series {
    /// One family.
    Direct(Arc<str>),
    /// One family over another, container by container.
    Ratio {
        /// Family above the line.
        numerator: Arc<str>,
        /// Family below the line.
        denominator: Arc<str>,
    },
}

impl Series {
    /// The families it needs.
    pub fn families(&self) -> impl Iterator<Item = &Arc<str>> {
        let (first, second) = match self {
            Self::Direct(name) => (name, None),
            Self::Ratio {
                numerator,
                denominator,
            } => (numerator, Some(denominator)),
        };
        std::iter::once(first).chain(second)
    }
}

/// What a custom metric describes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Per {
    /// Pods.
    Pods,
    /// Nodes.
    Nodes,
    /// Namespaces.
    Namespaces,
}

impl fmt::Display for Per {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Pods => "pods",
            Self::Nodes => "nodes",
            Self::Namespaces => "namespaces",
        })
    }
}

/// Which pods are served.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PodFilter {
    /// Only ready ones: an HPA must not count a pod that still loads as idle.
    Ready,
    /// All running ones.
    All,
}

/// How several devices become one value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Across {
    /// Their mean.
    Mean,
    /// The largest.
    Max,
    /// Their sum.
    Sum,
    /// The smallest.
    Min,
}

/// What a share is relative to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RelativeTo {
    /// The physical device (or slice) as the exporter measures it.
    Device,
    /// What this pod can get of it; the same while a pod holds a device alone.
    Share,
}

/// A look back over several readings.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Window {
    /// How far.
    pub length: Duration,
    /// What is made of the readings in it.
    pub function: Function,
}

/// What is made of the readings in a window.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Function {
    /// Their mean.
    Mean,
    /// The largest.
    Max,
    /// The smallest.
    Min,
    /// Growth of a counter each second, across its resets.
    Rate,
}

/// How old a value may be, by label `source`; values without one count as exclusive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MaxAge {
    /// The device belongs to the container alone.
    pub exclusive: Duration,
    /// Measured per MIG instance.
    pub mig_gpm: Duration,
    /// Measured per process.
    pub process: Duration,
}

impl MaxAge {
    /// The longest of the three.
    #[must_use]
    pub fn longest(&self) -> Duration {
        self.exclusive.max(self.mig_gpm).max(self.process)
    }

    /// The limit for one source.
    #[must_use]
    pub fn of(&self, source: Option<forewarm_signals::label::Source>) -> Duration {
        use forewarm_signals::label::Source;
        match source {
            None | Some(Source::Exclusive) => self.exclusive,
            Some(Source::MigGpm) => self.mig_gpm,
            Some(Source::Process) => self.process,
        }
    }
}

/// One external metric.
#[derive(Debug, Clone, PartialEq)]
pub struct External {
    /// Name in the API.
    pub name: Arc<str>,
    /// Source of its series.
    pub source: Arc<str>,
    /// Family.
    pub series: Arc<str>,
    /// Factor from the series' unit to the metric's.
    pub scale: f64,
    /// What becomes of several series that a request selects.
    pub reduce: Reduce,
    /// Who may read it; everybody where empty.
    pub namespaces: Vec<String>,
    /// Label that must equal the namespace of the request.
    pub namespace_label: Option<String>,
    /// How old a value may be.
    pub max_age: Duration,
}

/// What becomes of several series of an external metric.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reduce {
    /// All are returned; an HPA sums them.
    None,
    /// More than one is an error.
    Only,
    /// The largest.
    Max,
    /// Their sum.
    Sum,
}

/// One complaint about a file.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Complaint {
    /// Where, as `metrics[2].window.length`; empty for the file as a whole.
    pub path: String,
    /// What is wrong.
    pub cause: String,
    /// What to write instead.
    pub cure: String,
}

impl fmt::Display for Complaint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.path.is_empty() {
            write!(f, "{}: ", self.path)?;
        }
        write!(f, "{}", self.cause)?;
        if !self.cure.is_empty() {
            write!(f, "; {}", self.cure)?;
        }
        Ok(())
    }
}

/// Everything that is wrong with a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rejected {
    /// The file.
    pub file: String,
    /// At least one complaint.
    pub complaints: Vec<Complaint>,
}

impl std::error::Error for Rejected {}

impl fmt::Display for Rejected {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, complaint) in self.complaints.iter().enumerate() {
            if i > 0 {
                f.write_str("\n")?;
            }
            write!(f, "{}: {complaint}", self.file)?;
        }
        Ok(())
    }
}

impl Config {
    /// The families that must be fetched from a source, sorted.
    #[must_use]
    pub fn families_of(&self, source: &str) -> Vec<Arc<str>> {
        let custom = self.metrics.iter().filter(|metric| &*metric.source == source);
        let external = self
            .external
            .iter()
            .filter(|external| &*external.source == source);
        let mut families: Vec<Arc<str>> = custom
            .flat_map(|metric| metric.series.families().cloned())
            .chain(external.map(|external| Arc::clone(&external.series)))
            .collect();
        families.sort_unstable();
        families.dedup();
        families
    }
}

#[cfg(test)]
mod tests;
