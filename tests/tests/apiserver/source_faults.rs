//! Exporters that misbehave and configurations that are wrong, seen from the metrics API and the HPA.
//!
//! The misbehaving exporter is a [`forger`] on a node of the trial's own: first it tells the right values, then it goes
//! deaf, stalls, talks garbage, sends ten times the size, or has a clock that is off. Nothing but right values is ever
//! served, and the HPA stays where it is.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use forewarm_tests::process::{Behaviour, fetch};
use forewarm_tests::simnode::SimNode;
use forewarm_tests::wait::until;
use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use kube::api::{DeleteParams, PostParams};
use serde_json::json;

use crate::faults::forger_pod;
use crate::fixture::{Case, Fixture, case, disturbing};
use crate::forger::Forgery;
use crate::stack;
use crate::victim::{PATIENCE, REPLICAS, VALUE, Victim, adapters_count};

/// Beyond the metric's maxAge of 10 s: a value that would fade has faded.
const LONG_ENOUGH: Duration = Duration::from_secs(12);

pub(crate) fn cases() -> Vec<Case> {
    vec![
        case("fault_unreachable_exporter_is_named_with_its_cause", |fixture| {
            absent(fixture, "unreachable", "unreachable", |forgery, _| {
                forgery.set_deaf(true);
            })
        }),
        case("fault_slow_exporter_is_a_timeout_and_no_old_value", |fixture| {
            absent(fixture, "slow", "timeout", |forgery, body| {
                forgery.set(Behaviour {
                    delay: Duration::from_secs(5),
                    ..Behaviour::good(body)
                });
            })
        }),
        case("fault_exporter_that_talks_garbage_is_refused_whole", |fixture| {
            absent(fixture, "garbage", "parse", |forgery, body| {
                forgery.set(Behaviour::good(format!(
                    "{body}gpu_pod_sm_active_ratio{{pod=\"x 0.1\n"
                )));
            })
        }),
        case(
            "fault_exporter_that_answers_with_an_error_is_refused",
            |fixture| {
                absent(fixture, "error", "status", |forgery, body| {
                    forgery.set(Behaviour {
                        status: 500,
                        ..Behaviour::good(body)
                    });
                })
            },
        ),
        case("fault_exporter_of_ten_times_the_size_is_refused", |fixture| {
            absent(fixture, "huge", "too-large", |forgery, body| {
                let padding = "# HELP padding of a body that no node can have\n".repeat(1_000_000);
                forgery.set(Behaviour::good(format!("{body}{padding}")));
            })
        }),
        case("fault_clock_that_is_ten_minutes_off_changes_nothing", skewed),
        disturbing(
            "fault_wrong_configuration_is_refused_and_the_old_one_stays",
            configuration,
        ),
    ]
}

/// Replicas on a node whose exporter is a forger.
struct Forged {
    victim: Victim,
    node: SimNode,
    forgery: Arc<Forgery>,
    forger: String,
    body: String,
}

impl Forged {
    async fn start(fixture: &Fixture, purpose: &str) -> anyhow::Result<Self> {
        fixture.stack().await?;
        let name = format!("{purpose}-node");
        let node = fixture.own_node(&name).await?;
        let victim = Victim::deploy(
            fixture,
            purpose,
            json!({"nodeName": name, "tolerations": [{"operator": "Exists"}]}),
        )
        .await?;
        let replicas = until("all replicas run", PATIENCE, || async {
            let pods = victim.pods().await.map_err(|error| error.to_string())?;
            let running = pods.iter().filter(|pod| {
                pod.status.as_ref().and_then(|status| status.phase.as_deref()) == Some("Running")
            });
            if running.count() == REPLICAS as usize {
                Ok(pods)
            } else {
                Err(format!("{} pods", pods.len()))
            }
        })
        .await?;
        let body = body(&node, &victim.namespace, &replicas)?;
        let forger = format!("{purpose}-forger");
        let forgery = fixture.forgers().prepare(&forger, body.clone());
        let pods: Api<Pod> = Api::namespaced(victim.client.clone(), stack::NAMESPACE);
        pods.create(
            &PostParams::default(),
            &forger_pod(&victim.client, stack::NAMESPACE, &forger, &name).await?,
        )
        .await?;
        let forged = Self {
            victim,
            node,
            forgery,
            forger,
            body,
        };
        forged.victim.settle().await?;
        Ok(forged)
    }

    async fn end(self) -> anyhow::Result<()> {
        let pods: Api<Pod> = Api::namespaced(self.victim.client.clone(), stack::NAMESPACE);
        pods.delete(&self.forger, &DeleteParams::default()).await?;
        self.victim.end().await?;
        until("the forger is gone", PATIENCE, || async {
            match pods.get_opt(&self.forger).await {
                Ok(None) => Ok(()),
                other => Err(format!("{other:?}")),
            }
        })
        .await?;
        self.node.remove().await;
        Ok(())
    }
}

/// What an exporter tells of these pods, each at [`VALUE`].
fn body(node: &SimNode, namespace: &str, replicas: &[Pod]) -> anyhow::Result<String> {
    let mut text = String::new();
    for (pod, (gpu, uuid)) in replicas.iter().zip(node.gpu_uuids().iter().enumerate()) {
        let name = pod.metadata.name.as_deref().context("a name")?;
        let uid = pod.metadata.uid.as_deref().context("a UID")?;
        let row = format!(
            "namespace=\"{namespace}\",pod=\"{name}\",container=\"server\",pod_uid=\"{uid}\",gpu=\"{gpu}\",uuid=\"{uuid}\""
        );
        text += &format!(
            "gpu_pod_ready{{{row}}} 1\n\
             gpu_pod_sm_active_ratio{{{row},source=\"exclusive\"}} {}\n\
             gpu_pod_sample_age_seconds{{pod_uid=\"{uid}\",source=\"exclusive\"}} 0.1\n",
            VALUE / 100.0
        );
    }
    Ok(text)
}

/// The exporter misbehaves: its values age out, with the cause named and counted.
async fn absent(
    fixture: Arc<Fixture>,
    purpose: &'static str,
    result: &'static str,
    misbehave: impl Fn(&Forgery, &str),
) -> anyhow::Result<()> {
    let forged = Forged::start(&fixture, purpose).await?;
    let (client, scrapes) = (&forged.victim.client, "forewarm_adapter_scrapes_total");
    let before = adapters_count(client, scrapes, &[("result", result)]).await?;
    misbehave(&forged.forgery, &forged.body);
    let message = forged.victim.becomes_absent(None).await?;
    ensure!(
        message.contains("older than maxAge") && message.contains(&forged.forger),
        "neither limit nor exporter in: {message}"
    );
    let after = adapters_count(client, scrapes, &[("result", result)]).await?;
    ensure!(
        after > before,
        "{scrapes}{{result=\"{result}\"}} stays at {before}"
    );
    let (desired, inactive) = forged.victim.hpa().await?;
    ensure!(desired == REPLICAS, "the HPA moved to {desired}: {inactive:?}");

    forged.forgery.set_deaf(false);
    forged.forgery.set(Behaviour::good(forged.body.clone()));
    forged.victim.shows_the_right_values(PATIENCE).await?;
    forged.end().await
}

/// `Date` and explicit timestamps ten minutes in the past and in the future: the value's age line decides.
async fn skewed(fixture: Arc<Fixture>) -> anyhow::Result<()> {
    let forged = Forged::start(&fixture, "skewed").await?;
    for minutes in [-10_i64, 10] {
        let off = jiff::Timestamp::now() + jiff::SignedDuration::from_mins(minutes);
        let stamped: String = forged
            .body
            .lines()
            .map(|line| format!("{line} {}\n", off.as_millisecond()))
            .collect();
        let date = jiff::fmt::rfc2822::DateTimePrinter::new().timestamp_to_rfc9110_string(&off)?;
        let asked = forged.forgery.asked();
        forged.forgery.set(Behaviour {
            date: Some(date),
            ..Behaviour::good(stamped)
        });
        until("both adapters have read it", PATIENCE, || async {
            let now = forged.forgery.asked();
            if now >= asked + 4 {
                Ok(())
            } else {
                Err(format!("{} times", now - asked))
            }
        })
        .await?;
        forged
            .victim
            .is_untouched_for(LONG_ENOUGH)
            .await
            .with_context(|| format!("{minutes} minutes"))?;
        let answer = stack::get(&forged.victim.client, &forged.victim.path()).await?;
        for item in answer["items"].as_array().into_iter().flatten() {
            let measured: jiff::Timestamp = item["timestamp"].as_str().context("a timestamp")?.parse()?;
            let age = jiff::Timestamp::now().duration_since(measured).as_secs_f64();
            ensure!((-1.0..10.0).contains(&age), "measured {age} s ago, says {item}");
        }
    }
    forged.end().await
}

/// Unknown field, wrong unit, duplicate metric: each is named with file and path, and the old configuration stays.
async fn configuration(fixture: Arc<Fixture>) -> anyhow::Result<()> {
    let victim = Victim::start(&fixture, "configuration", "gpu-1").await?;
    type Edit = fn(&str) -> String;
    let mistakes: [(&str, Edit, &[&str]); 3] = [
        (
            "an unknown field",
            |config| config.replacen("interval: 2s", "intervall: 2s", 1),
            &["intervall", "interval"],
        ),
        (
            "a wrong unit",
            |config| config.replacen("interval: 2s", "interval: 2", 1),
            &["interval", "2s"],
        ),
        (
            "a duplicate metric",
            |config| {
                config.replacen(
                    "\nmetrics:\n",
                    "\nmetrics:\n- name: gpu_power_watts\n  source: exporters\n  series: gpu_pod_power_watts\n  per: pods\n",
                    1,
                )
            },
            &["gpu_power_watts"],
        ),
    ];
    let outcome = async {
        for (mistake, edit, named) in mistakes {
            stack::edit_adapter_config(&victim.client, edit).await?;
            until(
                &format!("{mistake} is refused by both adapters"),
                PATIENCE,
                || async {
                    refused(&victim, named)
                        .await
                        .map_err(|error| format!("{error:#}"))
                },
            )
            .await?;
            victim
                .is_untouched_for(Duration::from_secs(4))
                .await
                .context(mistake)?;
        }
        anyhow::Ok(())
    }
    .await;
    stack::add_metrics(&victim.client).await?;
    outcome?;
    until("the right configuration is in force", PATIENCE, || async {
        let good = adapters_count(&victim.client, "forewarm_adapter_config_last_reload_success", &[])
            .await
            .map_err(|error| error.to_string())?;
        if good >= 2.0 {
            Ok(())
        } else {
            Err(format!("on {good} adapters"))
        }
    })
    .await?;
    victim.shows_the_right_values(PATIENCE).await?;
    victim.end().await
}

/// Every adapter refuses its configuration and tells why, with the file and each of these words.
async fn refused(victim: &Victim, named: &[&str]) -> anyhow::Result<()> {
    for pod in stack::adapter_pods(&victim.client).await? {
        let address = pod
            .status
            .and_then(|status| status.pod_ip)
            .context("an adapter's address")?;
        let admin = std::net::SocketAddr::new(address.parse()?, 9411);
        let metrics = fetch(admin, "/metrics").await?.text();
        ensure!(
            metrics.contains("forewarm_adapter_config_last_reload_success 0"),
            "still in force"
        );
        let verbose = fetch(admin, "/readyz?verbose").await?.text();
        for word in named.iter().chain(&["config.yaml"]) {
            ensure!(verbose.contains(word), "{word} is not in: {verbose}");
        }
    }
    Ok(())
}
