//! Sources: targets, TLS, credentials, intervals and limits.

use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use super::Complaints;
use crate::config::load::Options;
use crate::config::scalar::shown;
use crate::config::{BasicAuth, Source, StaticTarget, Targets, Tls, raw};
use crate::selector::Selector;

/// Faster than NVML's own windows gains nothing; slower than a minute cannot steer an HPA.
const INTERVAL: RangeInclusive<Duration> = Duration::from_millis(500)..=Duration::from_secs(60);
const TIMEOUT: RangeInclusive<Duration> = Duration::from_millis(50)..=Duration::from_secs(60);
/// Ten times what a node with 16 GPUs in eight slices each writes.
const MAX_BODY: usize = 8 << 20;
const MAX_SERIES: usize = 50_000;

pub(super) fn resolve_sources(
    written: Option<&Vec<raw::Source>>,
    options: Options,
    out: &mut Complaints,
) -> Vec<Source> {
    let mut sources: Vec<Source> = Vec::new();
    for (i, source) in written.into_iter().flatten().enumerate() {
        let at = format!("sources[{i}]");
        let name = out.required(
            &format!("{at}.name"),
            source.name.as_ref(),
            "a name that metrics refer to",
        );
        let scrape = match (&source.scrape, &source.prometheus, &source.delegate) {
            (Some(scrape), None, None) => scrape,
            (None, Some(_), None) => {
                out.error(
                    &format!("{at}.prometheus"),
                    "a Prometheus source is not in this version",
                    "use scrape",
                );
                continue;
            }
            (None, None, Some(_)) => {
                out.error(
                    &format!("{at}.delegate"),
                    "a delegate source is not in this version",
                    "use scrape",
                );
                continue;
            }
            (None, None, None) => {
                out.error(&at, "does not say where samples come from", "add scrape");
                continue;
            }
            _ => {
                out.error(
                    &at,
                    "has more than one of scrape, prometheus and delegate",
                    "keep one",
                );
                continue;
            }
        };
        let resolved = resolve_scrape(
            name.as_deref().unwrap_or_default(),
            scrape,
            &format!("{at}.scrape"),
            options,
            out,
        );
        let Some(resolved) = resolved else { continue };
        if sources.iter().any(|other| other.name == resolved.name) {
            out.error(
                &format!("{at}.name"),
                format!("source {} is defined twice", resolved.name),
                "rename one",
            );
        } else if name.is_some() {
            sources.push(resolved);
        }
    }
    sources
}

fn resolve_scrape(
    name: &str,
    scrape: &raw::Scrape,
    at: &str,
    options: Options,
    out: &mut Complaints,
) -> Option<Source> {
    let targets = match (&scrape.discover, &scrape.targets) {
        (Some(discover), None) => resolve_discover(discover, at, options, out),
        (None, Some(targets)) => resolve_targets(targets, &format!("{at}.targets"), out),
        (None, None) => {
            out.error(at, "names no targets", "add discover or targets");
            None
        }
        (Some(_), Some(_)) => {
            out.error(at, "has both discover and targets", "keep one");
            None
        }
    };
    let interval = out.duration(
        &format!("{at}.interval"),
        scrape.interval.as_ref(),
        Duration::from_secs(2),
        &INTERVAL,
    );
    let timeout_at = format!("{at}.timeout");
    let timeout = out.duration(
        &timeout_at,
        scrape.timeout.as_ref(),
        Duration::from_secs(1).min(interval),
        &TIMEOUT,
    );
    if timeout > interval {
        let cause = format!(
            "{} is longer than the interval of {}",
            shown(timeout),
            shown(interval)
        );
        out.error(&timeout_at, cause, format!("write at most {}", shown(interval)));
    }
    let scheme_default = scrape.tls.is_some();
    let https = out.word(
        &format!("{at}.scheme"),
        scrape.scheme.as_deref(),
        scheme_default,
        &[("http", false), ("https", true)],
    );
    if !https && scrape.tls.is_some() {
        out.error(
            &format!("{at}.tls"),
            "is given although scheme is http",
            "write scheme: https or remove tls",
        );
    }
    if https && scrape.tls.as_ref().is_none_or(|tls| tls.ca_file.is_none()) {
        out.error(
            &format!("{at}.tls.caFile"),
            "is missing, so no certificate of a target could be verified",
            "give the CA that signed the targets' certificates",
        );
    }
    let tls = resolve_tls(scrape.tls.as_ref(), &format!("{at}.tls"), out);
    let basic_auth = scrape.basic_auth.as_ref().and_then(|basic| {
        let username = out.required(
            &format!("{at}.basicAuth.username"),
            basic.username.as_ref(),
            "the user's name",
        );
        let password = out.required(
            &format!("{at}.basicAuth.passwordFile"),
            basic.password_file.as_ref(),
            "a path",
        );
        Some(BasicAuth {
            username: username?,
            password_file: password?.into(),
        })
    });
    if scrape.basic_auth.is_some() && scrape.bearer_token_file.is_some() {
        out.error(
            &format!("{at}.basicAuth"),
            "is given together with bearerTokenFile",
            "keep one",
        );
    }
    if !https && (scrape.basic_auth.is_some() || scrape.bearer_token_file.is_some()) {
        out.warn(at, "credentials travel in clear over http", "write scheme: https");
    }
    let path = scrape.path.clone().unwrap_or_else(|| "/metrics".to_owned());
    if !path.starts_with('/') {
        out.error(
            &format!("{at}.path"),
            format!("'{path}' does not start with /"),
            format!("write /{path}"),
        );
    }
    Some(Source {
        name: Arc::from(name),
        targets: targets?,
        tls: https.then_some(tls),
        path,
        basic_auth,
        bearer_token_file: scrape.bearer_token_file.as_ref().map(PathBuf::from),
        interval,
        timeout,
        max_body_bytes: out.size(
            &format!("{at}.maxBodyBytes"),
            scrape.max_body_bytes.as_ref(),
            MAX_BODY,
            &(1024..=(1 << 28)),
        ),
        max_series: out.size(
            &format!("{at}.maxSeries"),
            scrape.max_series.as_ref(),
            MAX_SERIES,
            &(1..=10_000_000),
        ),
        name_filter: false,
    })
}

fn resolve_discover(
    discover: &raw::Discover,
    at: &str,
    options: Options,
    out: &mut Complaints,
) -> Option<Targets> {
    let at = format!("{at}.discover");
    if options.standalone {
        out.error(
            &at,
            "needs a cluster, and --standalone has none",
            "list targets instead",
        );
    }
    let Some(pods) = &discover.pods else {
        out.error(&at, "does not say what to discover", "add pods");
        return None;
    };
    let selector_at = format!("{at}.pods.selector");
    let selector = out.required(
        &selector_at,
        pods.selector.as_ref(),
        "app.kubernetes.io/name=forewarm-exporter",
    );
    let port = out.required(
        &format!("{at}.pods.port"),
        pods.port.as_ref(),
        "the name of a container port, such as metrics",
    );
    if let Some(selector) = &selector
        && let Err(error) = Selector::parse(selector)
    {
        out.error(
            &selector_at,
            error.to_string(),
            "write a label selector such as app=exporter",
        );
        return None;
    }
    Some(Targets::Pods {
        namespace: pods.namespace.clone(),
        selector: selector?,
        port: port?,
    })
}

fn resolve_targets(targets: &[raw::Target], at: &str, out: &mut Complaints) -> Option<Targets> {
    let mut resolved: Vec<StaticTarget> = Vec::new();
    for (i, target) in targets.iter().enumerate() {
        let at = format!("{at}[{i}]");
        let (address, node) = match target {
            raw::Target::Address(address) => (Some(address), None),
            raw::Target::Detailed(fields) => {
                for field in fields
                    .keys()
                    .filter(|field| !matches!(field.as_str(), "address" | "node"))
                {
                    out.error(&format!("{at}.{field}"), "unknown field", "write address or node");
                }
                (fields.get("address"), fields.get("node").cloned())
            }
        };
        let Some(address) = out.required(&at, address, "host:port") else {
            continue;
        };
        let port = address
            .rsplit_once(':')
            .and_then(|(host, port)| (!host.is_empty()).then(|| port.parse::<u16>().ok()))
            .flatten();
        if port.is_none() || address.contains('/') {
            out.error(
                &at,
                format!("'{address}' is not host:port"),
                "write host:port without scheme and path",
            );
        } else if resolved.iter().any(|other| other.address == address) {
            out.error(&at, format!("target {address} is listed twice"), "remove one");
        } else {
            resolved.push(StaticTarget { address, node });
        }
    }
    if targets.is_empty() {
        out.error(at, "is empty", "list at least one host:port");
        return None;
    }
    Some(Targets::Static(resolved))
}

fn resolve_tls(written: Option<&raw::Tls>, at: &str, out: &mut Complaints) -> Tls {
    let Some(tls) = written else { return Tls::default() };
    if tls.insecure_skip_verify == Some(true) {
        out.error(
            &format!("{at}.insecureSkipVerify"),
            "verification cannot be turned off: anybody who takes the address could steer scaling",
            "give caFile (a self-signed certificate may be its own CA)",
        );
    }
    let client = match (&tls.cert_file, &tls.key_file) {
        (Some(cert), Some(key)) => Some((PathBuf::from(cert), PathBuf::from(key))),
        (None, None) => None,
        _ => {
            out.error(at, "has only one of certFile and keyFile", "give both");
            None
        }
    };
    Tls {
        ca_file: tls.ca_file.as_ref().map(PathBuf::from),
        server_name: tls.server_name.clone(),
        client,
    }
}
