//! A recording replayed as offered load.
//!
//! Inputs: a CSV file with a header line, the names of its time and value columns, and how to use
//! them ([`Columns`]). Several rows of one time (one a pod) are summed with `sum_by_time`.
//!
//! Invariants: errors name file, line and column and say what to do; times grow; values are finite and
//! not negative; nothing of a recording is ever made up: between two rows the earlier one holds.

use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::OfferedLoad;

/// Which columns to read and how.
#[derive(Debug, Clone, PartialEq)]
pub struct Columns {
    /// Name of the column with the time: seconds from any start, or `YYYY-MM-DD hh:mm:ss`.
    pub time: String,
    /// Name of the column with the value.
    pub value: String,
    /// Adds up the values of rows with one time; otherwise such rows are an error.
    pub sum_by_time: bool,
    /// Factor from the column's unit to GPUs, such as 0.01 for percent of a GPU.
    pub scale: f64,
    /// Recorded seconds replayed in each real second.
    pub speed: f64,
}

/// A recording, ready for replay.
#[derive(Debug, Clone, PartialEq)]
pub struct Trace {
    /// Seconds since the first row, at recorded speed, and GPUs.
    points: Vec<(f64, f64)>,
    speed: f64,
}

/// Why a file cannot be replayed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The file could not be read.
    #[error("cannot read {path}: {source}; pass the path of a CSV file to --trace")]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// A setting makes no sense.
    #[error("--{setting} {value}: must be a finite number above 0")]
    Setting {
        /// `scale` or `speed`.
        setting: &'static str,
        /// What was given.
        value: f64,
    },
    /// The file has no rows.
    #[error("{path}: {what}; a CSV file needs a header line and at least two rows")]
    Empty {
        /// The file.
        path: PathBuf,
        /// What is missing.
        what: &'static str,
    },
    /// A named column is not there.
    #[error("{path}:1: no column `{column}`; there are: {there}. Name one of them with --{flag}")]
    NoColumn {
        /// The file.
        path: PathBuf,
        /// What was asked for.
        column: String,
        /// The columns of the header.
        there: String,
        /// The flag that names it.
        flag: &'static str,
    },
    /// A row cannot be used.
    #[error("{path}:{line}: column `{column}`: {problem}")]
    Row {
        /// The file.
        path: PathBuf,
        /// Line number, from 1.
        line: usize,
        /// The column.
        column: String,
        /// What is wrong and what helps.
        problem: Problem,
    },
}

/// What is wrong with a row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Problem {
    /// The row has too few fields.
    Missing,
    /// Quoted fields are not read.
    Quoted,
    /// Not a time.
    NotATime(String),
    /// Not a finite number, or negative.
    NotALoad(String),
    /// The time is that of the row before.
    Repeated(String),
    /// The time is before that of the row before.
    Backwards(String),
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Missing => write!(f, "the row ends before it; complete or remove the row"),
            Self::Quoted => write!(
                f,
                "quoted fields are not supported; export the file without quotes"
            ),
            Self::NotATime(text) => {
                write!(f, "`{text}` is not a time; seconds or `YYYY-MM-DD hh:mm:ss` are")
            }
            Self::NotALoad(text) => {
                write!(
                    f,
                    "`{text}` is not a load; a finite number of 0 or more is. Correct or remove the row"
                )
            }
            Self::Repeated(text) => {
                write!(
                    f,
                    "the time `{text}` is there already; pass --sum-by-time to add such rows up"
                )
            }
            Self::Backwards(text) => write!(
                f,
                "the time `{text}` is before the row above; sort the file by time"
            ),
        }
    }
}

impl Trace {
    /// Reads a file.
    ///
    /// # Errors
    /// See [`Error`].
    pub fn read(path: &Path, columns: &Columns) -> Result<Self, Error> {
        let text = std::fs::read_to_string(path).map_err(|source| Error::Read {
            path: path.to_owned(),
            source,
        })?;
        Self::parse(path, &text, columns)
    }

    /// Reads a file's text; `path` is for messages only.
    ///
    /// # Errors
    /// See [`Error`].
    pub fn parse(path: &Path, text: &str, columns: &Columns) -> Result<Self, Error> {
        for (setting, value) in [("scale", columns.scale), ("speed", columns.speed)] {
            if !(value.is_finite() && value > 0.0) {
                return Err(Error::Setting { setting, value });
            }
        }
        let empty = |what| Error::Empty {
            path: path.to_owned(),
            what,
        };
        // A byte order mark is no part of the first column's name.
        let mut lines = text.trim_start_matches('\u{feff}').lines().enumerate();
        let (_, header) = lines.next().ok_or_else(|| empty("the file is empty"))?;
        let names: Vec<_> = header.split(',').map(str::trim).collect();
        let find = |column: &str, flag| {
            names
                .iter()
                .position(|name| *name == column)
                .ok_or_else(|| Error::NoColumn {
                    path: path.to_owned(),
                    column: column.to_owned(),
                    there: names.join(", "),
                    flag,
                })
        };
        let (time_at, value_at) = (find(&columns.time, "time")?, find(&columns.value, "column")?);
        let mut points: Vec<(f64, f64)> = Vec::new();
        for (index, line) in lines.filter(|(_, line)| !line.trim().is_empty()) {
            let wrong = |column: &str, problem| Error::Row {
                path: path.to_owned(),
                line: index + 1,
                column: column.to_owned(),
                problem,
            };
            if line.contains('"') {
                return Err(wrong(&columns.value, Problem::Quoted));
            }
            let field = |at: usize, column: &str| {
                line.split(',')
                    .nth(at)
                    .map(str::trim)
                    .ok_or_else(|| wrong(column, Problem::Missing))
            };
            let time_text = field(time_at, &columns.time)?;
            let time = seconds(time_text)
                .ok_or_else(|| wrong(&columns.time, Problem::NotATime(time_text.to_owned())))?;
            let value_text = field(value_at, &columns.value)?;
            let value = value_text
                .parse::<f64>()
                .ok()
                .map(|value| value * columns.scale)
                .filter(|value| value.is_finite() && *value >= 0.0)
                .ok_or_else(|| wrong(&columns.value, Problem::NotALoad(value_text.to_owned())))?;
            match points.last_mut() {
                Some(last) if time < last.0 => {
                    return Err(wrong(&columns.time, Problem::Backwards(time_text.to_owned())));
                }
                Some(last) if time <= last.0 => {
                    if !columns.sum_by_time {
                        return Err(wrong(&columns.time, Problem::Repeated(time_text.to_owned())));
                    }
                    last.1 += value;
                }
                _ => points.push((time, value)),
            }
        }
        let start = points
            .first()
            .ok_or_else(|| empty("there are no rows under the header"))?
            .0;
        if points.len() < 2 {
            return Err(empty("there is only one time"));
        }
        for point in &mut points {
            point.0 -= start;
        }
        Ok(Self {
            points,
            speed: columns.speed,
        })
    }

    /// The largest load in it.
    #[must_use]
    pub fn peak(&self) -> f64 {
        self.points.iter().map(|point| point.1).fold(0.0, f64::max)
    }
}

impl OfferedLoad for Trace {
    fn gpus(&self, since_start: Duration) -> f64 {
        let recorded = since_start.as_secs_f64() * self.speed;
        let after = self.points.partition_point(|point| point.0 <= recorded);
        self.points
            .get(after.saturating_sub(1))
            .map_or(0.0, |point| point.1)
    }

    fn length(&self) -> Duration {
        let last = self.points.last().map_or(0.0, |point| point.0);
        Duration::try_from_secs_f64(last / self.speed).unwrap_or(Duration::MAX)
    }
}

/// A time column's text in seconds.
fn seconds(text: &str) -> Option<f64> {
    if let Ok(number) = text.parse::<f64>() {
        return number.is_finite().then_some(number);
    }
    let civil: jiff::civil::DateTime = text.parse().ok()?;
    Some(
        jiff::tz::Offset::UTC
            .to_timestamp(civil)
            .ok()?
            .as_duration()
            .as_secs_f64(),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn columns() -> Columns {
        Columns {
            time: "time_s".into(),
            value: "busy".into(),
            sum_by_time: true,
            scale: 0.01,
            speed: 10.0,
        }
    }

    fn parse(text: &str, columns: &Columns) -> Result<Trace, String> {
        Trace::parse(Path::new("load.csv"), text, columns).map_err(|error| error.to_string())
    }

    #[test]
    fn rows_of_one_time_are_summed_scaled_and_replayed() {
        let trace = parse(
            "time_s,pod,busy\n100,a,50\n100,b,100\n157,a,20\n157,b,\u{30}\n",
            &columns(),
        )
        .unwrap();
        assert!((trace.gpus(Duration::ZERO) - 1.5).abs() < 1e-9);
        assert!((trace.gpus(Duration::from_millis(5_600)) - 1.5).abs() < 1e-9);
        assert!((trace.gpus(Duration::from_millis(5_700)) - 0.2).abs() < 1e-9);
        assert!((trace.gpus(Duration::from_secs(999)) - 0.2).abs() < 1e-9);
        assert_eq!(trace.length(), Duration::from_millis(5_700));
        assert!((trace.peak() - 1.5).abs() < 1e-9);
    }

    #[test]
    fn dates_are_times_too() {
        let mut columns = columns();
        columns.time = "time".into();
        columns.speed = 60.0;
        let trace = parse(
            "time,busy\n2017-10-03 00:00:00,312\n2017-10-03 00:01:00,309\n",
            &columns,
        )
        .unwrap();
        assert_eq!(trace.length(), Duration::from_secs(1));
    }

    #[test]
    fn bad_files_name_file_line_column_and_cure() {
        let cases: [(&str, &[&str]); 9] = [
            ("", &["load.csv", "empty"]),
            ("time_s,busy\n", &["load.csv", "no rows"]),
            ("time_s,busy\n1,5\n", &["only one time"]),
            ("t,busy\n1,5\n", &["load.csv:1", "`time_s`", "t, busy", "--time"]),
            (
                "time_s,load\n1,5\n",
                &["load.csv:1", "`busy`", "time_s, load", "--column"],
            ),
            ("time_s,busy\n1,5\n2\n", &["load.csv:3", "`busy`", "ends before"]),
            (
                "time_s,busy\nnoon,5\n",
                &["load.csv:2", "`time_s`", "`noon`", "YYYY"],
            ),
            (
                "time_s,busy\n1,NaN\n",
                &["load.csv:2", "`busy`", "`NaN`", "finite"],
            ),
            ("time_s,busy\n2,5\n1,5\n", &["load.csv:3", "`time_s`", "sort"]),
        ];
        for (text, expected) in cases {
            let message = parse(text, &columns()).unwrap_err();
            for part in expected {
                assert!(message.contains(part), "{message:?} should contain {part:?}");
            }
        }
        assert!(
            parse("time_s,busy\n1,-5\n", &columns())
                .unwrap_err()
                .contains("0 or more")
        );
        assert!(
            parse("time_s,busy\n1,\"5\"\n", &columns())
                .unwrap_err()
                .contains("quote")
        );
        let missing = Trace::read(Path::new("no/such.csv"), &columns())
            .unwrap_err()
            .to_string();
        assert!(
            missing.contains("no/such.csv") && missing.contains("--trace"),
            "{missing}"
        );
    }

    #[test]
    fn repeated_times_need_the_flag_that_sums_them() {
        let mut columns = columns();
        columns.sum_by_time = false;
        let message = parse("time_s,busy\n1,5\n1,5\n", &columns).unwrap_err();
        assert!(
            message.contains("load.csv:3") && message.contains("--sum-by-time"),
            "{message}"
        );
    }

    #[test]
    fn scale_and_speed_must_be_positive() {
        for (scale, speed) in [(0.0, 1.0), (1.0, -1.0), (f64::NAN, 1.0), (1.0, f64::INFINITY)] {
            let columns = Columns {
                scale,
                speed,
                ..columns()
            };
            assert!(
                parse("time_s,busy\n1,5\n2,5\n", &columns)
                    .unwrap_err()
                    .contains("above 0")
            );
        }
    }

    proptest! {
        #[test]
        fn no_text_breaks_it(text in "(time_s|busy|[0-9.,\"\n -]|nan|inf){0,60}") {
            let text = format!("time_s,busy\n{text}");
            if let Ok(trace) = Trace::parse(Path::new("x.csv"), &text, &columns()) {
                for second in 0..100 {
                    let load = trace.gpus(Duration::from_secs(second));
                    prop_assert!(load.is_finite() && load >= 0.0);
                }
            }
        }
    }
}
