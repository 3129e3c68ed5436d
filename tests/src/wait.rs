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
        // A look that takes too long keeps the last finished one, which says more than "timed out".
        match tokio::time::timeout(left, look()).await {
            Ok(Ok(value)) => return Ok(value),
            Ok(Err(seen)) => last = seen,
            Err(_) => {}
        }
        // Asked here and not by the time-out alone: a look that never waits is never timed out.
        if start.elapsed() >= within {
            return Err(Late {
                what: what.to_owned(),
                within,
                last,
            });
        }
        tokio::time::sleep(PAUSE.min(within.saturating_sub(start.elapsed()))).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_condition_that_never_holds_ends_at_the_deadline() {
        let late = until("never", Duration::from_millis(50), || async {
            Err::<(), _>("no".to_owned())
        })
        .await;
        assert_eq!(late.unwrap_err().last, "no");
        let late = until("hangs", Duration::from_millis(50), || {
            std::future::pending::<Result<(), String>>()
        })
        .await;
        assert_eq!(late.unwrap_err().last, "never looked");
    }
}
