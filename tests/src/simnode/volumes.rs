//! A pod's volumes as folders on the simulated node.
//!
//! ConfigMaps, Secrets, projected and downward API volumes are written as the kubelet writes them: files
//! in a time-stamped folder, `..data` pointing at it, each name a link through `..data`. An update makes a
//! new folder and swaps `..data` by rename, so a reader sees all of the old or all of the new. Programs
//! that watch inodes miss that; that is the point of doing it the same way.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use k8s_openapi::api::authentication::v1::{BoundObjectReference, TokenRequest, TokenRequestSpec};
use k8s_openapi::api::core::v1::{
    DownwardAPIVolumeFile, HostPathVolumeSource, KeyToPath, Pod, ServiceAccount,
    ServiceAccountTokenProjection, Volume, VolumeProjection,
};
use kube::api::PostParams;
use kube::{Api, Client};
use tokio::sync::Mutex;

use super::environment::{Addresses, Missing, config_map, field, secret};

/// Default of the API for files in such volumes.
const DEFAULT_MODE: i32 = 0o644;
/// Host paths that mean the machine's own, because the testbed cannot simulate devices or processes.
const REAL_HOST_PATHS: [&str; 3] = ["/dev", "/proc", "/sys"];

/// Files of a volume by relative path, with their mode.
type Files = BTreeMap<String, (Vec<u8>, i32)>;

/// The volumes of one pod.
#[derive(Debug)]
pub struct Volumes {
    client: Shown,
    pod: Pod,
    addresses: Addresses,
    folder: PathBuf,
    host_root: PathBuf,
    tokens: Mutex<BTreeMap<String, String>>,
    written: Mutex<BTreeMap<String, Files>>,
}

/// `Client` has no `Debug`.
#[derive(Clone)]
struct Shown(Client);

impl std::fmt::Debug for Shown {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("Client")
    }
}

impl Volumes {
    /// Volumes of `pod` below `folder`; host paths are below `host_root`.
    #[must_use]
    pub fn new(client: Client, pod: Pod, addresses: Addresses, folder: PathBuf, host_root: PathBuf) -> Self {
        let (tokens, written) = Default::default();
        Self {
            client: Shown(client),
            pod,
            addresses,
            folder,
            host_root,
            tokens,
            written,
        }
    }

    /// Folder or file of one volume on this machine.
    #[must_use]
    pub fn path(&self, volume: &Volume) -> PathBuf {
        match &volume.host_path {
            Some(host) if is_real(&host.path) => PathBuf::from(&host.path),
            Some(host) => self.host_root.join(host.path.trim_start_matches('/')),
            None => self.folder.join(&volume.name),
        }
    }

    /// Writes what is new or has changed. Called at start, until it succeeds, and then again and again.
    ///
    /// # Errors
    /// [`Missing`] says what the pod waits for.
    pub async fn refresh(&self) -> Result<(), Missing> {
        let volumes = self.pod.spec.as_ref().and_then(|spec| spec.volumes.as_ref());
        for volume in volumes.into_iter().flatten() {
            if let Some(host) = &volume.host_path {
                check_host_path(host, &self.path(volume))?;
                continue;
            }
            let folder = self.path(volume);
            let Some(files) = self.files(volume).await? else {
                fs::create_dir_all(&folder).map_err(|error| written(&folder, &error))?;
                continue;
            };
            let mut known = self.written.lock().await;
            if known.get(&volume.name) != Some(&files) {
                publish(&folder, &files).map_err(|error| written(&folder, &error))?;
                known.insert(volume.name.clone(), files);
            }
        }
        Ok(())
    }

    /// The files of a volume that has content of its own; `None` for an emptyDir.
    async fn files(&self, volume: &Volume) -> Result<Option<Files>, Missing> {
        let mut files = Files::new();
        if let Some(source) = &volume.config_map {
            let optional = source.optional.unwrap_or(false);
            let data = config_map(&self.client.0, self.namespace(), &source.name, optional).await?;
            pick(
                &mut files,
                data,
                source.items.as_deref(),
                source.default_mode,
                optional,
            )?;
        } else if let Some(source) = &volume.secret {
            let name = source.secret_name.as_deref().unwrap_or_default();
            let optional = source.optional.unwrap_or(false);
            let data = secret(&self.client.0, self.namespace(), name, optional).await?;
            pick(
                &mut files,
                data,
                source.items.as_deref(),
                source.default_mode,
                optional,
            )?;
        } else if let Some(source) = &volume.downward_api {
            self.downward(&mut files, source.items.as_deref(), source.default_mode)?;
        } else if let Some(source) = &volume.projected {
            for projection in source.sources.iter().flatten() {
                self.project(&mut files, projection, source.default_mode).await?;
            }
        } else {
            return Ok(None);
        }
        Ok(Some(files))
    }

    async fn project(
        &self,
        files: &mut Files,
        projection: &VolumeProjection,
        mode: Option<i32>,
    ) -> Result<(), Missing> {
        if let Some(source) = &projection.config_map {
            let optional = source.optional.unwrap_or(false);
            let data = config_map(&self.client.0, self.namespace(), &source.name, optional).await?;
            pick(files, data, source.items.as_deref(), mode, optional)?;
        }
        if let Some(source) = &projection.secret {
            let optional = source.optional.unwrap_or(false);
            let data = secret(&self.client.0, self.namespace(), &source.name, optional).await?;
            pick(files, data, source.items.as_deref(), mode, optional)?;
        }
        if let Some(source) = &projection.downward_api {
            self.downward(files, source.items.as_deref(), mode)?;
        }
        if let Some(source) = &projection.service_account_token {
            let token = self.token(source).await?;
            // As the kubelet does it: a token is for its owner only.
            files.insert(source.path.clone(), (token.into_bytes(), 0o600));
        }
        Ok(())
    }

    fn downward(
        &self,
        files: &mut Files,
        items: Option<&[DownwardAPIVolumeFile]>,
        mode: Option<i32>,
    ) -> Result<(), Missing> {
        for item in items.unwrap_or_default() {
            let Some(reference) = &item.field_ref else {
                continue;
            };
            let value = field(&reference.field_path, &self.pod, self.addresses)?;
            files.insert(
                item.path.clone(),
                (value.into_bytes(), mode.unwrap_or(DEFAULT_MODE)),
            );
        }
        Ok(())
    }

    /// A token bound to the pod, asked for once: tests end long before it does.
    async fn token(&self, source: &ServiceAccountTokenProjection) -> Result<String, Missing> {
        let mut tokens = self.tokens.lock().await;
        if let Some(token) = tokens.get(&source.path) {
            return Ok(token.clone());
        }
        let account = self
            .pod
            .spec
            .as_ref()
            .and_then(|spec| spec.service_account_name.as_deref());
        let request = TokenRequest {
            spec: TokenRequestSpec {
                audiences: source.audience.iter().cloned().collect(),
                bound_object_ref: Some(BoundObjectReference {
                    api_version: Some("v1".to_owned()),
                    kind: Some("Pod".to_owned()),
                    name: self.pod.metadata.name.clone(),
                    uid: self.pod.metadata.uid.clone(),
                }),
                expiration_seconds: source.expiration_seconds,
            },
            ..TokenRequest::default()
        };
        let accounts: Api<ServiceAccount> = Api::namespaced(self.client.0.clone(), self.namespace());
        let answer = accounts
            .create_token_request(account.unwrap_or("default"), &PostParams::default(), &request)
            .await
            .map_err(|error| Missing(format!("failed to fetch token: {error}")))?;
        let token = answer.status.map(|status| status.token).unwrap_or_default();
        tokens.insert(source.path.clone(), token.clone());
        Ok(token)
    }

    fn namespace(&self) -> &str {
        self.pod.metadata.namespace.as_deref().unwrap_or("default")
    }
}

fn is_real(path: &str) -> bool {
    REAL_HOST_PATHS
        .iter()
        .any(|real| path == *real || path.strip_prefix(real).is_some_and(|rest| rest.starts_with('/')))
}

fn written(path: &Path, error: &io::Error) -> Missing {
    Missing(format!("cannot write {}: {error}", path.display()))
}

fn check_host_path(source: &HostPathVolumeSource, path: &Path) -> Result<(), Missing> {
    let refused = |what: &str| {
        Err(Missing(format!(
            "hostPath type check failed: {} is not {what}",
            source.path
        )))
    };
    match source.type_.as_deref().unwrap_or_default() {
        "DirectoryOrCreate" => fs::create_dir_all(path).map_err(|error| written(path, &error)),
        "FileOrCreate" if path.exists() => Ok(()),
        "FileOrCreate" => fs::File::create(path)
            .map(|_| ())
            .map_err(|error| written(path, &error)),
        "Directory" if !path.is_dir() => refused("a directory"),
        "File" if !path.is_file() => refused("a file"),
        "Socket" | "CharDevice" | "BlockDevice" | "" if !path.exists() => refused("there"),
        _ => Ok(()),
    }
}

/// All of `data`, or only the chosen items under their paths.
fn pick(
    files: &mut Files,
    data: BTreeMap<String, Vec<u8>>,
    items: Option<&[KeyToPath]>,
    mode: Option<i32>,
    optional: bool,
) -> Result<(), Missing> {
    let mode = mode.unwrap_or(DEFAULT_MODE);
    let Some(items) = items.filter(|items| !items.is_empty()) else {
        files.extend(data.into_iter().map(|(key, value)| (key, (value, mode))));
        return Ok(());
    };
    for item in items {
        match data.get(&item.key) {
            Some(value) => {
                files.insert(item.path.clone(), (value.clone(), item.mode.unwrap_or(mode)));
            }
            None if optional => {}
            None => return Err(Missing(format!("references non-existent key: {}", item.key))),
        }
    }
    Ok(())
}

/// Writes a new generation of files and swaps `..data` to it.
fn publish(folder: &Path, files: &Files) -> io::Result<()> {
    static GENERATION: AtomicU64 = AtomicU64::new(0);
    fs::create_dir_all(folder)?;
    let name = format!("..generation-{}", GENERATION.fetch_add(1, Ordering::Relaxed));
    let generation = folder.join(&name);
    for (path, (content, mode)) in files {
        let file = generation.join(path);
        if let Some(parent) = file.parent() {
            fs::create_dir_all(parent)?;
        }
        fs::write(&file, content)?;
        fs::set_permissions(
            &file,
            fs::Permissions::from_mode(u32::try_from(*mode).unwrap_or(0o644)),
        )?;
    }
    fs::create_dir_all(&generation)?;
    let data = folder.join("..data");
    let old = fs::read_link(&data).ok();
    let staged = folder.join("..data_tmp");
    let _ = fs::remove_file(&staged);
    symlink(&name, &staged)?;
    fs::rename(&staged, &data)?;
    let tops: std::collections::BTreeSet<&str> =
        files.keys().filter_map(|path| path.split('/').next()).collect();
    for entry in fs::read_dir(folder)? {
        let entry = entry?.file_name();
        let entry = entry.to_string_lossy();
        if !entry.starts_with("..") && !tops.contains(&*entry) {
            fs::remove_file(folder.join(&*entry))?;
        }
    }
    for top in tops {
        let link = folder.join(top);
        if fs::symlink_metadata(&link).is_err() {
            symlink(Path::new("..data").join(top), link)?;
        }
    }
    if let Some(old) = old {
        fs::remove_dir_all(folder.join(old))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn files(pairs: &[(&str, &str)]) -> Files {
        pairs
            .iter()
            .map(|(path, text)| ((*path).to_owned(), (text.as_bytes().to_vec(), 0o640)))
            .collect()
    }

    #[test]
    fn an_update_swaps_one_link() {
        let folder = tempfile::tempdir().unwrap();
        let read = |name: &str| fs::read_to_string(folder.path().join(name)).ok();
        publish(folder.path(), &files(&[("a", "1"), ("sub/b", "2")])).unwrap();
        assert_eq!((read("a"), read("sub/b")), (Some("1".into()), Some("2".into())));
        let generation = fs::read_link(folder.path().join("..data")).unwrap();
        assert_eq!(
            fs::read_link(folder.path().join("a")).unwrap(),
            Path::new("..data/a")
        );
        publish(folder.path(), &files(&[("a", "3")])).unwrap();
        assert_eq!((read("a"), read("sub/b")), (Some("3".into()), None));
        assert!(
            !folder.path().join(generation).exists(),
            "the old generation is gone"
        );
        let mode = fs::metadata(folder.path().join("a"))
            .unwrap()
            .permissions()
            .mode();
        assert_eq!(mode & 0o777, 0o640);
    }

    #[test]
    fn devices_of_the_machine_are_not_simulated() {
        assert!(
            is_real("/dev") && is_real("/proc/1") && !is_real("/devices") && !is_real("/var/lib/kubelet")
        );
    }
}
