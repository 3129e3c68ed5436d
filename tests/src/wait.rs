//! Waiting for a condition with a deadline, the only kind of waiting in level tests.

use std::future::Future;
use std::time::{Duration, Instant};

/// Time between two looks at a condition: short against what is waited for (seconds), long against a look.
const PAUSE: Duration = Duration::from_millis(100);

/// A condition that did not come true in time.
#[derive(Debug, thiserror::Error)]
#[error("{what} did not come true within {within:?}: {last}")]
pub struct Late {
    /// The condition.
    pub what: String,
    /// The deadline.
    pub within: Duration,
    /// What the last look saw.
    pub last: String,
}

/// Looks until `look` answers `Ok`, whose value is returned.
///
/// # Errors
/// [`Late`] with what the last look saw when `within` has passed.
pub async fn until<T, F, Fut>(what: &str, within: Duration, mut look: F) -> Result<T, Late>
where
    F: FnMut() -> Fut,
    Fut: Future<Output = Result<T, String>>,
{
    let start = Instant::now();
    let mut last = "never looked".to_owned();
    loop {
        let left = within.saturating_sub(start.elapsed());
        match tokio::time::timeout(left, look()).await {
            Ok(Ok(value)) => return Ok(value),
            Ok(Err(seen)) => last = seen,
            // Keeps the last finished look, which says more than "timed out".
            Err(_) => {
                return Err(Late {
                    what: what.to_owned(),
                    within,
                    last,
                });
            }
        }
        tokio::time::sleep(PAUSE.min(within.saturating_sub(start.elapsed()))).await;
    }
}
