//! From the text of `/proc/<pid>/cgroup` to the pod and container a process belongs to.
//!
//! Purpose: recognise a pod's UID and a container's id in the path, whoever laid it out.
//! Inputs: the text of the file, cgroup v1, v2 or both.
//! ```text
//! containerd, systemd   0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod<uid_>.slice/cri-containerd-<id>.scope
//! cri-o, systemd        0::/kubepods.slice/…-pod<uid_>.slice/crio-<id>.scope/container
//! docker, systemd       0::/kubepods.slice/…-pod<uid_>.slice/docker-<id>.scope
//! cgroupfs              0::/kubepods/burstable/pod<uid>/<id>         guaranteed: /kubepods/pod<uid>/<id>
//! containerd, v1        5:cpu:/system.slice/containerd.service/kubepods-burstable-pod<uid_>.slice:cri-containerd:<id>
//! nested node           0::/kubelet.slice/kubelet-kubepods.slice/…   or /docker/<id>/kubelet/kubepods/burstable/pod<uid>/<id>
//! own cgroup namespace  0::/../../kubepods-burstable.slice/…         a sibling container: 0::/../<id>, which names no pod
//! ```
//! Invariants: pure. A path is matched anywhere in its line and from left to right: the first pod is the one that this
//! node's kubelet started, what comes below it is its own affair. Lines that name different pods name none.

/// The 36 characters of a UUID, hyphens or underscores after these.
const GROUPS: [usize; 5] = [8, 4, 4, 4, 12];
/// A static pod's UID is a hash without hyphens.
const STATIC_UID: usize = 32;
/// Container ids of every runtime.
const CONTAINER_ID: usize = 64;
/// What the kernel appends once the cgroup is gone while a process still lies in it.
const DELETED: &str = " (deleted)";

/// Who a process belongs to.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Owner {
    /// UID of the pod, with hyphens; 32 hexadecimal digits for a static pod.
    pub pod_uid: String,
    /// Id of the container, 64 hexadecimal digits; absent where the path has none in a form that is known.
    pub container_id: Option<String>,
}

/// Why no pod is told.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum NoPod {
    /// No path names a pod: a process of the host.
    Host,
    /// A path leads out of the reader's cgroup namespace and the part below its common root names no pod.
    Hidden,
    /// Lines name different pods, as where a node runs inside a pod of another one.
    Ambiguous,
    /// Not the text of such a file.
    Malformed,
}

/// Reads the text of `/proc/<pid>/cgroup`.
///
/// # Errors
/// Why it names no pod.
pub fn owner(text: &str) -> Result<Owner, NoPod> {
    let mut found: Option<Owner> = None;
    let mut is_hidden = false;
    let mut is_read = false;
    for path in text.lines().filter_map(path) {
        is_read = true;
        match (owner_of(path), &mut found) {
            (Some(owner), None) => found = Some(owner),
            (Some(owner), Some(known)) if known.pod_uid != owner.pod_uid => return Err(NoPod::Ambiguous),
            (Some(owner), Some(known)) => {
                // Controllers may lie at different depths; two ids cannot both be the container.
                known.container_id = match (known.container_id.take(), owner.container_id) {
                    (Some(one), Some(other)) => (one == other).then_some(one),
                    (one, other) => one.or(other),
                };
            }
            (None, _) => is_hidden |= path.starts_with("/.."),
        }
    }
    found.ok_or(match (is_read, is_hidden) {
        (false, _) => NoPod::Malformed,
        (true, true) => NoPod::Hidden,
        (true, false) => NoPod::Host,
    })
}

/// The path of a line `N:controllers:/path`.
fn path(line: &str) -> Option<&str> {
    let mut parts = line.splitn(3, ':');
    let number = parts.next()?;
    let path = parts.nth(1)?;
    let is_number = !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit());
    (is_number && path.starts_with('/')).then(|| path.strip_suffix(DELETED).unwrap_or(path))
}

fn owner_of(path: &str) -> Option<Owner> {
    // The colon form packs slice, runtime and id into one piece.
    let mut pieces = path.split(['/', ':']);
    let pod_uid = pieces.by_ref().find_map(pod_of)?;
    let container_id = pieces.find_map(container_of).map(ToOwned::to_owned);
    Some(Owner {
        pod_uid,
        container_id,
    })
}

/// The pod UID in one piece of a path: `pod<uid>` or `<anything>-pod<uid_>.slice`.
fn pod_of(piece: &str) -> Option<String> {
    let name = piece.strip_suffix(".slice").unwrap_or(piece);
    let (before, uid) = name.rsplit_once("pod")?;
    let is_start = before.is_empty() || before.ends_with('-');
    (is_start && is_uid(uid)).then(|| uid.replace('_', "-"))
}

fn is_uid(text: &str) -> bool {
    if text.len() == STATIC_UID {
        return is_hex(text);
    }
    ['-', '_'].iter().any(|separator| {
        let mut groups = text.split(*separator);
        GROUPS.iter().all(|length| {
            groups
                .next()
                .is_some_and(|group| group.len() == *length && is_hex(group))
        }) && groups.next().is_none()
    })
}

/// The container id in one piece: `<id>` or `<runtime>-<id>.scope`.
fn container_of(piece: &str) -> Option<&str> {
    let name = piece.strip_suffix(".scope").unwrap_or(piece);
    let (runtime, id) = name.rsplit_once('-').unwrap_or(("", name));
    // cri-o's monitor has a scope of its own beside the container's; the id in it is not where a container runs.
    (!runtime.ends_with("conmon") && id.len() == CONTAINER_ID && is_hex(id)).then_some(id)
}

/// Kubernetes and the runtimes write lower case.
fn is_hex(text: &str) -> bool {
    text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const UID: &str = "3f0a6c1e-9d5b-4b7c-8e2f-1a2b3c4d5e6f";
    const UID_: &str = "3f0a6c1e_9d5b_4b7c_8e2f_1a2b3c4d5e6f";
    const OTHER: &str = "00000000-1111-2222-3333-444444444444";
    const ID: &str = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";
    const STATIC: &str = "0123456789abcdef0123456789abcdef";

    fn filled(text: &str) -> String {
        text.replace("<uid_>", UID_)
            .replace("<uid>", UID)
            .replace("<other>", OTHER)
            .replace("<static>", STATIC)
            .replace("<id>", ID)
    }

    /// The pod, and whether the container was found.
    fn read(text: &str) -> Result<(String, bool), NoPod> {
        let owner = owner(&filled(text))?;
        assert!(owner.container_id.as_deref().is_none_or(|id| id == ID));
        Ok((owner.pod_uid, owner.container_id.is_some()))
    }

    #[test]
    fn every_layout_names_its_pod_and_container() {
        for line in [
            // containerd, cri-o and docker under systemd
            "0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod<uid_>.slice/cri-containerd-<id>.scope",
            "0::/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod<uid_>.slice/crio-<id>.scope",
            "0::/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod<uid_>.slice/crio-<id>.scope/container",
            "0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod<uid_>.slice/docker-<id>.scope",
            // guaranteed
            "0::/kubepods.slice/kubepods-pod<uid_>.slice/cri-containerd-<id>.scope",
            // cgroupfs
            "0::/kubepods/burstable/pod<uid>/<id>",
            "0::/kubepods/besteffort/pod<uid>/<id>",
            "0::/kubepods/pod<uid>/<id>",
            "4:memory:/kubepods/besteffort/pod<uid>/<id>",
            "1:name=systemd:/kubepods/pod<uid>/<id>",
            "11:cpu,cpuacct:/kubepods/burstable/pod<uid>/<id>",
            // containerd with a systemd slice and no systemd driver
            "5:devices:/system.slice/containerd.service/kubepods-burstable-pod<uid_>.slice:cri-containerd:<id>",
            "0::/kubepods-burstable-pod<uid_>.slice:cri-containerd:<id>",
            // nested: kind, minikube, k3s, a node below another cgroup
            "0::/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-burstable.slice/kubelet-kubepods-burstable-pod<uid_>.slice/cri-containerd-<id>.scope",
            "0::/docker/fedcba9876543210fedcba9876543210fedcba9876543210fedcba9876543210/kubelet/kubepods/burstable/pod<uid>/<id>",
            "0::/system.slice/docker-fedcba9876543210fedcba9876543210fedcba9876543210fedcba9876543210.scope/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-pod<uid_>.slice/cri-containerd-<id>.scope",
            "0::/system.slice/k3s.service/kubepods/burstable/pod<uid>/<id>",
            "0::/node-a/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod<uid_>.slice/cri-containerd-<id>.scope",
            // a reader with a cgroup namespace of its own
            "0::/../../burstable/pod<uid>/<id>",
            "0::/../../kubepods-burstable.slice/kubepods-burstable-pod<uid_>.slice/cri-containerd-<id>.scope",
            "0::/../pod<uid>/<id>",
            // what a container makes below itself
            "0::/kubepods/burstable/pod<uid>/<id>/docker/fedcba9876543210fedcba9876543210fedcba9876543210fedcba9876543210",
            "0::/kubepods/burstable/pod<uid>/<id>/kubelet/kubepods/pod<other>/fedcba9876543210fedcba9876543210fedcba9876543210fedcba9876543210",
            "0::/kubepods.slice/kubepods-pod<uid_>.slice/cri-containerd-<id>.scope/init.scope",
            // the cgroup was removed, the process is about to end
            "0::/kubepods/burstable/pod<uid>/<id> (deleted)",
        ] {
            assert_eq!(read(line), Ok((UID.to_owned(), true)), "{line}");
            assert_eq!(read(&format!("{line}\n")), Ok((UID.to_owned(), true)), "{line}");
        }
    }

    #[test]
    fn a_static_pod_has_a_hash_for_uid() {
        for line in [
            "0::/kubepods/burstable/pod<static>/<id>",
            "0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod<static>.slice/cri-containerd-<id>.scope",
        ] {
            assert_eq!(read(line), Ok((STATIC.to_owned(), true)), "{line}");
        }
    }

    #[test]
    fn a_pod_without_a_known_container_is_still_the_pod() {
        for line in [
            "0::/kubepods/burstable/pod<uid>",
            "0::/kubepods/burstable/pod<uid>/kata_<id>",
            "0::/kubepods.slice/kubepods-pod<uid_>.slice/crio-conmon-<id>.scope",
            "4:memory:/kubepods/pod<uid>/<id>\n0::/kubepods/pod<uid>/fedcba9876543210fedcba9876543210fedcba9876543210fedcba9876543210",
        ] {
            assert_eq!(read(line), Ok((UID.to_owned(), false)), "{line}");
        }
    }

    #[test]
    fn lines_of_one_process_are_read_together() {
        let v1 = "10:pids:/kubepods/pod<uid>/<id>\n4:memory:/kubepods/pod<uid>/<id>\n0::/system.slice/containerd.service\n";
        assert_eq!(read(v1), Ok((UID.to_owned(), true)));
        // A hybrid machine whose kubelet uses the unified hierarchy: the other lines are somebody else's.
        let hybrid = "9:name=systemd:/\n4:memory:/sandbox/4711\n0::/kubepods/burstable/pod<uid>/<id>\n";
        assert_eq!(read(hybrid), Ok((UID.to_owned(), true)));
        let deeper = "4:memory:/kubepods/pod<uid>\n0::/kubepods/pod<uid>/<id>";
        assert_eq!(read(deeper), Ok((UID.to_owned(), true)));
    }

    #[test]
    fn what_names_no_pod_says_why() {
        for (text, why) in [
            ("0::/", NoPod::Host),
            ("0::/init.scope\n", NoPod::Host),
            ("0::/user.slice/user-0.slice/session-1.scope", NoPod::Host),
            ("0::/docker/<id>", NoPod::Host),
            ("0::/machine.slice/libpod-<id>.scope", NoPod::Host),
            ("0::/kubepods.slice", NoPod::Host),
            ("0::/kubepods/burstable/podcast", NoPod::Host),
            ("0::/kubepods/burstable/tripod<uid>/<id>", NoPod::Host),
            ("0::/kubepods/burstable/pod<uid>0/<id>", NoPod::Host),
            // A sibling container of the reader's own pod, below the root of the reader's namespace.
            ("0::/../<id>", NoPod::Hidden),
            ("0::/../cri-containerd-<id>.scope", NoPod::Hidden),
            (
                "4:memory:/kubepods/pod<uid>/<id>\n0::/kubepods/pod<other>/<id>",
                NoPod::Ambiguous,
            ),
            ("", NoPod::Malformed),
            ("cpu cores : 4", NoPod::Malformed),
            ("::/kubepods/pod<uid>/<id>", NoPod::Malformed),
            ("0::kubepods/pod<uid>/<id>", NoPod::Malformed),
        ] {
            assert_eq!(read(text), Err(why), "{text}");
        }
    }

    proptest! {
        #[test]
        fn any_text_is_read_without_harm(text in r"[0-9:/.\-_a-fpod\n \\PC]{0,300}") {
            if let Ok(owner) = owner(&text) {
                prop_assert!(is_uid(&owner.pod_uid));
                prop_assert!(text.replace('_', "-").contains(&owner.pod_uid));
                prop_assert!(owner.container_id.is_none_or(|id| text.contains(&id)));
            }
        }

        #[test]
        fn a_pod_is_found_below_and_above_anything(
            above in proptest::collection::vec("[a-z0-9_.]{1,12}", 0..4),
            below in proptest::collection::vec("[a-z0-9_.]{1,12}", 0..4),
            uid in "[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
            id in "[0-9a-f]{64}",
            is_systemd in any::<bool>(),
            others in 0_usize..4,
        ) {
            prop_assume!(above.iter().all(|piece| pod_of(piece).is_none()));
            let pod = if is_systemd {
                format!("kubepods-pod{}.slice/cri-containerd-{id}.scope", uid.replace('-', "_"))
            } else {
                format!("pod{uid}/{id}")
            };
            let path = [above.join("/"), pod, below.join("/")].join("/");
            let mut text = "3:cpu:/elsewhere\n".repeat(others);
            text.push_str(&format!("0::/{path}\n"));
            prop_assert_eq!(owner(&text), Ok(Owner { pod_uid: uid, container_id: Some(id) }));
        }
    }
}
