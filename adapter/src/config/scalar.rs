//! Times, sizes and numbers as authors write them.
//!
//! Invariants: a time always carries its unit; the cure names what was probably meant.

use std::ops::RangeInclusive;
use std::time::Duration;

use super::raw::Scalar;

/// Cause and cure.
pub(super) type Wrong = (String, String);

/// Reads a time within `range`.
pub(super) fn duration(scalar: &Scalar, range: &RangeInclusive<Duration>) -> Result<Duration, Wrong> {
    let text = match scalar {
        Scalar::Integer(number) => return Err(unitless(&number.to_string())),
        Scalar::Float(number) => return Err(unitless(&number.to_string())),
        Scalar::Text(text) => text.trim(),
    };
    let digits = text
        .find(|c: char| !c.is_ascii_digit() && c != '.')
        .unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let seconds = match unit {
        "" => return Err(unitless(text)),
        "ms" => 0.001,
        "s" => 1.0,
        "m" => 60.0,
        "h" => 3600.0,
        _ => {
            return Err((
                format!("'{text}' is not a time"),
                "write a number and ms, s, m or h, such as 2s".to_owned(),
            ));
        }
    };
    let parsed = number
        .parse::<f64>()
        .ok()
        .and_then(|number| Duration::try_from_secs_f64(number * seconds).ok());
    let Some(duration) = parsed else {
        return Err((
            format!("'{text}' is not a time"),
            "write a number and its unit, such as 2s".to_owned(),
        ));
    };
    if range.contains(&duration) {
        return Ok(duration);
    }
    let within = format!("write {} to {}", shown(*range.start()), shown(*range.end()));
    let likely = number
        .parse::<f64>()
        .ok()
        .and_then(|number| Duration::try_from_secs_f64(number).ok())
        .filter(|meant| unit != "s" && range.contains(meant))
        .map_or(within.clone(), |_| {
            format!("{within}; write {number}s if seconds were meant")
        });
    Err((format!("{text} is out of range"), likely))
}

fn unitless(text: &str) -> Wrong {
    (
        format!("{text} has no unit"),
        format!("write {text}s if seconds were meant"),
    )
}

/// A time as an author would write it.
pub(super) fn shown(duration: Duration) -> String {
    let millis = duration.as_millis();
    if millis.is_multiple_of(60_000) && millis > 0 {
        format!("{}m", millis / 60_000)
    } else if millis.is_multiple_of(1000) {
        format!("{}s", millis / 1000)
    } else {
        format!("{millis}ms")
    }
}

/// Reads a size in bytes: a number, or one with `Ki`, `Mi`, `k` or `M`.
pub(super) fn size(scalar: &Scalar, range: &RangeInclusive<usize>) -> Result<usize, Wrong> {
    let text = match scalar {
        Scalar::Integer(number) => number.to_string(),
        Scalar::Float(number) => number.to_string(),
        Scalar::Text(text) => text.trim().to_owned(),
    };
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let factor = match unit {
        "" => Some(1),
        "k" => Some(1000),
        "M" => Some(1_000_000),
        "Ki" => Some(1024),
        "Mi" => Some(1024 * 1024),
        _ => None,
    };
    let size = factor.and_then(|factor| number.parse::<usize>().ok()?.checked_mul(factor));
    match size {
        None => Err((
            format!("'{text}' is not a size"),
            "write a number with k, M, Ki or Mi, such as 8Mi".to_owned(),
        )),
        Some(size) if range.contains(&size) => Ok(size),
        Some(_) => Err((
            format!("{text} is out of range"),
            format!("write {} to {}", range.start(), range.end()),
        )),
    }
}

/// Reads a finite number other than zero.
pub(super) fn factor(scalar: &Scalar) -> Result<f64, Wrong> {
    let wrong = |text: &str| {
        (
            format!("'{text}' is not a usable factor"),
            "write a number other than 0, such as 100".to_owned(),
        )
    };
    match scalar {
        #[allow(clippy::cast_precision_loss, reason = "factors are small")]
        Scalar::Integer(number) if *number != 0 => Ok(*number as f64),
        Scalar::Float(number) if number.is_finite() && number.abs() > 0.0 => Ok(*number),
        Scalar::Integer(number) => Err(wrong(&number.to_string())),
        Scalar::Float(number) => Err(wrong(&number.to_string())),
        Scalar::Text(text) => Err(wrong(text)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(scalar: &Scalar) -> Result<Duration, Wrong> {
        duration(scalar, &(Duration::from_millis(500)..=Duration::from_secs(60)))
    }

    #[test]
    fn times_need_a_unit_and_a_sensible_size() {
        let text = |text: &str| Scalar::Text(text.to_owned());
        assert_eq!(read(&text("2s")), Ok(Duration::from_secs(2)));
        assert_eq!(read(&text("1.5s")), Ok(Duration::from_millis(1500)));
        assert_eq!(read(&text("1m")), Ok(Duration::from_secs(60)));
        for (scalar, cure) in [
            (Scalar::Integer(2), "write 2s"),
            (text("2"), "write 2s"),
            (text("2m"), "write 2s if seconds were meant"),
            (text("2 sec"), "such as 2s"),
            (text("soon"), "such as 2s"),
            (text("100ms"), "write 500ms to 1m"),
        ] {
            let wrong = read(&scalar).unwrap_err();
            assert!(wrong.1.contains(cure), "{scalar:?}: {wrong:?}");
        }
    }

    #[test]
    fn sizes_take_the_usual_suffixes() {
        let range = 1..=usize::MAX;
        assert_eq!(size(&Scalar::Text("8Mi".to_owned()), &range), Ok(8 << 20));
        assert_eq!(size(&Scalar::Integer(5), &range), Ok(5));
        assert!(size(&Scalar::Text("8MB".to_owned()), &range).is_err());
        assert!(size(&Scalar::Integer(-1), &range).is_err());
    }
}
