//! Rounds of certificate management.
//!
//! Purpose: reads what is, asks `plan`, does it, serves the result.
//! Inputs: Secret, APIServices, clock.
//! Invariants: a failed step leaves what is served as it is and is tried again; what is served always comes
//! from the Secret, so all replicas serve the same.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use arc_swap::ArcSwapOption;
use forewarm_runtime::BoxError;
use forewarm_runtime::exit::chain;
use forewarm_runtime::metrics::register;
use forewarm_runtime::status::Condition;
use forewarm_signals::serving;
use k8s_openapi::api::core::v1::Secret;
use k8s_openapi::kube_aggregator::pkg::apis::apiregistration::v1::APIService;
use kube::api::Api;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use tokio_util::sync::CancellationToken;

use super::material::{Material, make_ca, make_cert, served};
use super::plan::{Step, plan};
use super::registration::{self, Standing};
use super::secret::{self, Written};
use super::{Error, Settings};

/// How often a replica that lost a race reads again before it gives the round up.
const ATTEMPTS: u32 = 5;
/// While an installation is under way: the APIServices may come after the pods.
const EAGER_EVERY: Duration = Duration::from_secs(2);
/// How long an installation may take.
const EAGER_FOR: Duration = Duration::from_secs(120);
/// When all is well: an APIService that somebody overwrote or made anew is available again before anybody looks, at
/// four reads a round.
const CALM_EVERY: Duration = Duration::from_secs(10);
/// What `certs` waits for altogether, with the API server starting at the same time.
const ONCE_DEADLINE: Duration = Duration::from_secs(60);

/// The certificate served now; handshakes fail until there is one.
#[derive(Debug, Default)]
pub struct ServedCert {
    current: ArcSwapOption<CertifiedKey>,
}

impl ResolvesServerCert for ServedCert {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        self.current.load_full()
    }
}

/// What a round led to.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Round {
    /// APIServices of ours that trust our CAs.
    pub trusting: usize,
    /// APIServices that could not be given our CAs, each with the reason.
    pub open: Vec<String>,
    /// End of the serving certificate, since the Unix epoch.
    pub until: Duration,
}

impl Round {
    /// Whether nothing is left to do.
    #[must_use]
    pub fn is_settled(&self) -> bool {
        self.open.is_empty()
    }
}

/// Metrics of certificate management. Clones share them.
#[derive(Debug, Clone, Default)]
pub struct Metrics {
    expiry: Gauge,
    rounds: Family<[(&'static str, &'static str); 1], Counter>,
}

impl Metrics {
    /// Registers the metrics.
    pub fn register(&self, registry: &mut Registry) {
        register(
            registry,
            &serving::CERTIFICATE_EXPIRY_TIMESTAMP_SECONDS,
            self.expiry.clone(),
        );
        register(registry, &serving::CERTIFICATE_ROUNDS_TOTAL, self.rounds.clone());
    }

    fn round(&self, outcome: &'static str) {
        self.rounds.get_or_create(&[("outcome", outcome)]).inc();
    }
}

/// Manages the certificate of one adapter.
pub struct Manager {
    secrets: Api<Secret>,
    services: Api<APIService>,
    namespace: String,
    settings: Settings,
    served: Arc<ServedCert>,
    material: Material,
    metrics: Metrics,
}

impl Manager {
    /// Over `client`, for the adapter in `namespace`; the certificate is served through `served`.
    #[must_use]
    pub fn new(
        client: &kube::Client,
        namespace: &str,
        settings: Settings,
        served: Arc<ServedCert>,
        metrics: Metrics,
    ) -> Self {
        Self {
            secrets: Api::namespaced(client.clone(), namespace),
            services: Api::all(client.clone()),
            namespace: namespace.to_owned(),
            settings,
            served,
            material: Material::default(),
            metrics,
        }
    }

    /// Names that the certificate must carry; kube-apiserver verifies `<service>.<namespace>.svc`.
    fn names(&self) -> Vec<String> {
        let (service, namespace) = (&self.settings.service, &self.namespace);
        vec![
            format!("{service}.{namespace}.svc"),
            format!("{service}.{namespace}.svc.cluster.local"),
            format!("{service}.{namespace}"),
        ]
    }

    /// One round.
    ///
    /// # Errors
    /// Where the Secret could not be read or written; APIServices that resist are in [`Round::open`].
    pub async fn round(&mut self) -> Result<Round, Error> {
        let names = self.names();
        for _ in 0..ATTEMPTS {
            let stored = secret::read(&self.secrets, &self.settings.secret).await?;
            let now = now();
            let held = stored.material.appraise(&names);
            let trusted = self.standings(&stored.material.ca).await;
            let trusted_everywhere = trusted.iter().all(|(_, standing)| {
                matches!(
                    standing,
                    Ok(Standing::Trusting | Standing::Foreign(_) | Standing::Absent)
                )
            });
            let step = plan(&held, trusted_everywhere, now);
            if step == Step::Keep {
                let until = held.cert.map_or(Duration::ZERO, |cert| cert.validity.until);
                self.serve(&stored.material)?;
                return Ok(self.register_all(trusted, until).await);
            }
            let made = make(&stored.material, step, &names, now)?;
            let written = secret::write(&self.secrets, &self.settings.secret, stored, &made).await?;
            tracing::info!(?step, outcome = ?written, secret = self.settings.secret, "certificate written");
            if written == Written::Ours {
                // Serving at once spares a first installation a round; the next one reads it back.
                self.serve(&made)?;
            }
        }
        Err(Error::Contended(ATTEMPTS))
    }

    async fn standings(&self, ca: &str) -> Vec<(String, Result<Standing, Error>)> {
        let mut standings = Vec::new();
        for name in registration::names() {
            let standing =
                registration::read(&self.services, &name, &self.namespace, &self.settings.service, ca).await;
            standings.push((name, standing));
        }
        standings
    }

    async fn register_all(
        &self,
        standings: Vec<(String, Result<Standing, Error>)>,
        until: Duration,
    ) -> Round {
        let mut round = Round {
            until,
            ..Round::default()
        };
        for (name, standing) in standings {
            let open = match standing {
                Ok(Standing::Trusting) => None,
                Ok(Standing::Absent) => Some("does not exist".to_owned()),
                Ok(Standing::Foreign(other)) => Some(format!("points to service {other}, left alone")),
                Ok(Standing::Outdated { version }) => {
                    match registration::trust(&self.services, &name, version.as_deref(), &self.material.ca)
                        .await
                    {
                        Ok(true) => {
                            tracing::info!(apiservice = name, "CA registered");
                            None
                        }
                        Ok(false) => Some("changed meanwhile".to_owned()),
                        Err(error) => Some(chain(&error)),
                    }
                }
                Err(error) => Some(chain(&error)),
            };
            match open {
                None => round.trusting += 1,
                Some(reason) => round.open.push(format!("{name}: {reason}")),
            }
        }
        round
    }

    fn serve(&mut self, material: &Material) -> Result<(), Error> {
        if self.material == *material {
            return Ok(());
        }
        let pair = served(&material.cert, &material.key)?;
        self.served.current.store(Some(Arc::new(pair)));
        self.material = material.clone();
        tracing::info!(names = ?self.names(), "serving certificate in use");
        Ok(())
    }

    /// Rounds until cancelled; `condition` is ready once there is a certificate to serve.
    ///
    /// # Errors
    /// Never.
    pub async fn run(mut self, condition: Condition, token: CancellationToken) -> Result<(), BoxError> {
        let started = Instant::now();
        let mut told = Vec::new();
        loop {
            let result = tokio::select! {
                () = token.cancelled() => return Ok(()),
                result = self.round() => result,
            };
            let settled = match result {
                Ok(round) => {
                    condition.ready();
                    self.metrics
                        .round(if round.is_settled() { "settled" } else { "open" });
                    self.metrics
                        .expiry
                        .set(i64::try_from(round.until.as_secs()).unwrap_or(i64::MAX));
                    if round.open != told {
                        for open in &round.open {
                            tracing::warn!(reason = open, "APIService without our CA");
                        }
                        told.clone_from(&round.open);
                    }
                    round.is_settled()
                }
                Err(error) => {
                    self.metrics.round("failed");
                    let error = chain(&error);
                    tracing::warn!(error, "certificate round failed, retrying");
                    if self.served.current.load().is_none() {
                        condition.waiting(error);
                    }
                    false
                }
            };
            let pause = if settled || started.elapsed() > EAGER_FOR {
                CALM_EVERY
            } else {
                EAGER_EVERY
            };
            tokio::select! {
                () = token.cancelled() => return Ok(()),
                () = tokio::time::sleep(pause) => {}
            }
        }
    }
}

/// Makes and registers the certificate once, and writes it to files where asked.
///
/// Absent or foreign APIServices are reported in the result and are no failure: they may come later.
///
/// # Errors
/// Where the Secret or the files could not be written within a minute.
pub async fn ensure_once(
    client: &kube::Client,
    namespace: &str,
    settings: Settings,
    write: Option<&Path>,
) -> Result<Round, Error> {
    let mut manager = Manager::new(client, namespace, settings, Arc::default(), Metrics::default());
    let deadline = Instant::now() + ONCE_DEADLINE;
    let round = loop {
        match manager.round().await {
            Ok(round) => break round,
            Err(error) if Instant::now() < deadline => {
                tracing::warn!(error = chain(&error), "certificate round failed, retrying");
                tokio::time::sleep(EAGER_EVERY).await;
            }
            Err(error) => return Err(error),
        }
    };
    if let Some(directory) = write {
        let material = &manager.material;
        for (name, text) in [
            ("ca.crt", &material.ca),
            ("tls.key", &material.key),
            ("tls.crt", &material.cert),
        ] {
            write_file(&directory.join(name), text)?;
        }
    }
    Ok(round)
}

/// Replaces a file whole, readable by its owner only.
fn write_file(path: &Path, text: &str) -> Result<(), Error> {
    use std::io::Write as _;
    use std::os::unix::fs::OpenOptionsExt as _;
    let failed = |source| Error::Write {
        path: path.to_owned(),
        source,
    };
    let new = path.with_extension("new");
    let mut file = std::fs::OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(&new)
        .map_err(failed)?;
    file.write_all(text.as_bytes()).map_err(failed)?;
    drop(file);
    std::fs::rename(&new, path).map_err(failed)
}

/// New material from old, as the step says.
fn make(old: &Material, step: Step, names: &[String], now: Duration) -> Result<Material, Error> {
    match step {
        Step::Keep => Ok(old.clone()),
        Step::MakeAll => {
            let (ca, ca_key) = make_ca(now)?;
            let (cert, key) = make_cert(&ca, &ca_key, names, now)?;
            Ok(Material {
                ca,
                ca_key,
                cert,
                key,
            })
        }
        Step::MakeCa => {
            let (ca, ca_key) = make_ca(now)?;
            Ok(Material {
                ca: format!("{ca}{}", old.live_cas(now)),
                ca_key,
                ..old.clone()
            })
        }
        Step::MakeCert => {
            let (cert, key) = make_cert(&old.ca, &old.ca_key, names, now)?;
            Ok(Material {
                cert,
                key,
                ..old.clone()
            })
        }
    }
}

fn now() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Duration = Duration::from_secs(1_790_000_000);

    fn names() -> Vec<String> {
        vec!["forewarm-adapter.forewarm.svc".to_owned()]
    }

    /// Follows the plan over twenty years, a week at a time, with clients that learn CAs a week late: the
    /// certificate they are shown is always signed by a CA that they know.
    #[test]
    fn over_twenty_years_no_client_meets_a_certificate_it_cannot_verify() {
        const WEEK: Duration = Duration::from_secs(7 * 24 * 3600);
        let mut material = make(&Material::default(), Step::MakeAll, &names(), NOW).unwrap();
        let mut known = material.ca.clone();
        let (mut cas, mut certs) = (0, 0);
        for week in 1..1043 {
            let now = NOW + WEEK * week;
            let trusted = known == material.ca;
            let step = plan(&material.appraise(&names()), trusted, now);
            let before = known.clone();
            known.clone_from(&material.ca);
            material = make(&material, step, &names(), now).unwrap();
            match step {
                Step::MakeCa => cas += 1,
                Step::MakeCert => certs += 1,
                Step::Keep => {}
                Step::MakeAll => panic!("nothing was lost"),
            }
            let seen = Material {
                ca: before,
                ..material.clone()
            };
            let held = seen.appraise(&names()).cert.unwrap();
            assert!(
                held.validity.from <= now && now < held.validity.until,
                "week {week}"
            );
        }
        assert!((2..=3).contains(&cas), "{cas} CAs");
        assert!(certs > 80, "{certs} certificates");
    }

    #[test]
    fn files_are_replaced_whole_and_private() {
        use std::os::unix::fs::PermissionsExt as _;
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("tls.key");
        write_file(&path, "one").unwrap();
        write_file(&path, "two").unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "two");
        assert_eq!(
            std::fs::metadata(&path).unwrap().permissions().mode() & 0o777,
            0o600
        );
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
    }
}
