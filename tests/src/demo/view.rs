//! The picture as lines of text, for a terminal.
//!
//! Invariants: pure; no line is wider than asked for, no more lines than fit; what does not fit is left
//! out from the least important block (events, then pods), never cut in the middle.

use std::collections::VecDeque;

use super::picture::{Act, ActStatus, Picture, PodRow, Sample};

/// How a piece of text looks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Look {
    /// As it is.
    Plain,
    /// Less important.
    Dim,
    /// A heading or a number to look at.
    Bold,
    /// As it should be.
    Good,
    /// Worth a look.
    Warning,
    /// Not as it should be.
    Bad,
    /// A plot.
    Plot,
}

/// A piece of a line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Piece {
    /// The text.
    pub text: String,
    /// How it looks.
    pub look: Look,
}

/// A line.
pub type Line = Vec<Piece>;

fn piece(text: impl Into<String>, look: Look) -> Piece {
    Piece {
        text: text.into(),
        look,
    }
}

/// Width of the names and of the numbers of the upper block.
const NAME: usize = 14;
const VALUE: usize = 22;

/// From this height on there are blank lines between blocks, and evidence under acts.
const ROOMY: usize = 34;

/// A value younger than this is as fresh as it gets, seconds.
const FRESH: f64 = 5.0;

/// Fewest lines left for events before pods are shortened.
const LEAST_EVENTS: usize = 3;

/// Draws the picture into at most `height` lines of at most `width` columns.
#[must_use]
pub fn lines(picture: &Picture, width: usize, height: usize) -> Vec<Line> {
    let roomy = height >= ROOMY;
    let mut top = head(picture, width);
    top.extend(readings(picture, width));
    top.push(Vec::new());
    top.extend(picture.acts.iter().flat_map(|act| act_lines(act, roomy, width)));
    let nodes = node_lines(picture);
    let pods = pod_lines(&picture.pods);
    let foot: Vec<Line> = picture
        .links
        .iter()
        .map(|link| vec![piece(format!(" {link}"), Look::Dim)])
        .collect();

    // In a roomy view each of the four blocks below has a blank line before it.
    let fixed = top.len() + nodes.len() + foot.len() + if roomy { 4 } else { 1 };
    let room = height.saturating_sub(fixed);
    let pods = shortened(pods, room.saturating_sub(LEAST_EVENTS));
    let events = event_lines(picture, room.saturating_sub(pods.len()));

    let mut all = top;
    if !roomy {
        all.push(Vec::new());
    }
    for block in [nodes, pods, events, foot] {
        if roomy && !block.is_empty() {
            all.push(Vec::new());
        }
        all.extend(block);
    }
    all.truncate(height);
    all.into_iter().map(|line| clipped(line, width)).collect()
}

fn head(picture: &Picture, width: usize) -> Vec<Line> {
    let mut lines = vec![vec![
        piece(" forewarm ", Look::Bold),
        piece(format!("{}  ", clock(picture.elapsed)), Look::Bold),
        piece(picture.subtitle.clone(), Look::Dim),
    ]];
    // Two lines always, so that nothing below jumps about.
    let mut now = wrapped(&picture.now, width.saturating_sub(NOW.len()));
    now.resize(2, String::new());
    let first = now.remove(0);
    lines.push(vec![piece(NOW, Look::Dim), piece(first, Look::Warning)]);
    let indent = " ".repeat(NOW.len());
    lines.extend(
        now.into_iter()
            .map(|text| vec![piece(format!("{indent}{text}"), Look::Warning)]),
    );
    lines
}

/// Before the sentence about the moment.
const NOW: &str = " now  ";

/// Cut into lines at spaces; a word longer than a line is left to be clipped.
fn wrapped(text: &str, width: usize) -> Vec<String> {
    let mut lines = vec![String::new()];
    for word in text.split_whitespace() {
        let last = lines.last().map_or(0, |line| line.chars().count());
        match lines.last_mut() {
            Some(line) if last == 0 => line.push_str(word),
            Some(line) if last + 1 + word.chars().count() <= width => {
                line.push(' ');
                line.push_str(word);
            }
            _ => lines.push(word.to_owned()),
        }
    }
    lines
}

fn readings(picture: &Picture, width: usize) -> Vec<Line> {
    let last = picture.last();
    let room = width.saturating_sub(NAME + VALUE + 3);
    // Plots share the width; each is as high as its largest value, but at least `least`.
    let plot = |value: fn(&Sample) -> Option<f64>, least: f64| {
        let top = picture.history.iter().filter_map(value).fold(least, f64::max);
        sparkline(&picture.history, value, top, room)
    };
    let told = |value: Option<f64>, digits: usize, unit: &str| {
        value.map_or("no value".to_owned(), |value| format!("{value:.digits$} {unit}"))
    };
    let good = |is: bool| if is { Look::Good } else { Look::Warning };
    let busy = match last.busy {
        Some(busy) if busy > 99.0 => "100 % (saturated)".to_owned(),
        busy => told(busy, 0, "%"),
    };
    let sm_active = match picture.target {
        Some(target) => format!("{} of {target:.0} %", told(last.sm_active, 0, "%")),
        None => told(last.sm_active, 0, "%"),
    };
    let fresh = last.age.is_some_and(|age| age < FRESH);
    let mut rows = Vec::new();
    if last.offered.is_some() {
        let load = told(last.offered, 2, "GPUs");
        rows.push(row(
            "offered load",
            &load,
            Look::Bold,
            plot(|sample| sample.offered, 1.0),
        ));
    }
    rows.push(row(
        "GPU busy",
        &busy,
        Look::Plain,
        plot(|sample| sample.busy, 100.0),
    ));
    rows.push(row(
        "SM active",
        &sm_active,
        Look::Bold,
        plot(|sample| sample.sm_active, 100.0),
    ));
    if last.queue.is_some() {
        let queue = told(last.queue, 0, "requests");
        rows.push(row(
            "queue",
            &queue,
            Look::Plain,
            plot(|sample| sample.queue, 20.0),
        ));
    }
    let age = told(last.age, 1, "s");
    rows.push(row(
        "value age",
        &age,
        good(fresh),
        plot(|sample| sample.age, FRESH),
    ));
    if let (Some(current), Some(desired)) = (last.current, last.desired) {
        let wish = format!("{current} now, {desired} wanted");
        let wishes = plot(|sample| sample.desired.map(f64::from), 2.0);
        rows.push(row("HPA", &wish, good(current == desired), wishes));
    }
    let replicas = format!("{} ready, {} loading", last.ready, last.loading);
    let ready = plot(|sample| Some(f64::from(sample.ready)), 2.0);
    rows.push(row("replicas", &replicas, good(last.loading == 0), ready));
    rows
}

fn row(name: &str, value: &str, look: Look, plot: String) -> Line {
    vec![
        piece(format!(" {name:<NAME$}"), Look::Dim),
        piece(format!("{value:<VALUE$} "), look),
        piece(plot, Look::Plot),
    ]
}

/// The newest `width` columns of a series; a blank where there was no value.
fn sparkline(
    history: &VecDeque<Sample>,
    value: fn(&Sample) -> Option<f64>,
    top: f64,
    width: usize,
) -> String {
    const BARS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
    // All of it, squeezed, until it is longer than a quarter of an hour's story can be.
    let each = history.len().div_ceil(width.max(1)).max(1);
    let samples: Vec<_> = history.iter().collect();
    samples
        .chunks(each)
        .map(|chunk| {
            let values: Vec<f64> = chunk.iter().filter_map(|sample| value(sample)).collect();
            if values.is_empty() {
                return ' ';
            }
            let highest = values.iter().copied().fold(0.0, f64::max);
            let eighths = (highest / top.max(f64::MIN_POSITIVE) * 8.0)
                .ceil()
                .clamp(1.0, 8.0);
            // Between 1 and 8 by the clamp.
            #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "1..=8")]
            let bar = eighths as usize - 1;
            BARS[bar]
        })
        .collect()
}

fn act_lines(act: &Act, with_evidence: bool, width: usize) -> Vec<Line> {
    let (mark, look) = match act.status {
        ActStatus::Waiting => ("[ ]", Look::Dim),
        ActStatus::Running => ("[~]", Look::Warning),
        ActStatus::Shown => ("[x]", Look::Good),
        ActStatus::Refuted => ("[!]", Look::Bad),
    };
    let mut lines = vec![vec![piece(format!(" {mark} {}", act.claim), look)]];
    if with_evidence && !act.evidence.is_empty() {
        let indent = "     ";
        let evidence = wrapped(&act.evidence, width.saturating_sub(indent.len()));
        lines.extend(
            evidence
                .into_iter()
                .map(|text| vec![piece(format!("{indent}{text}"), Look::Dim)]),
        );
    }
    lines
}

fn node_lines(picture: &Picture) -> Vec<Line> {
    picture
        .nodes
        .iter()
        .map(|node| {
            let free = node.gpus.saturating_sub(node.used);
            let exporter = if node.exporter == "up" {
                Look::Good
            } else {
                Look::Bad
            };
            vec![
                piece(format!(" {:<NAME$}", node.name), Look::Plain),
                piece("■".repeat(node.used), Look::Plot),
                piece("·".repeat(free), Look::Dim),
                piece(
                    format!("  {} of {} GPUs   exporter ", node.used, node.gpus),
                    Look::Dim,
                ),
                piece(node.exporter.to_owned(), exporter),
            ]
        })
        .collect()
}

fn pod_lines(pods: &[PodRow]) -> Vec<Line> {
    pods.iter()
        .map(|pod| {
            let look = match pod.phase {
                "ready" => Look::Good,
                "loading" | "pending" => Look::Warning,
                _ => Look::Dim,
            };
            let values = match (pod.busy, pod.sm_active) {
                (Some(busy), Some(sm)) => {
                    let age = pod.age.map_or(String::new(), |age| format!("   {age:.1} s old"));
                    format!("busy {busy:>3.0} %   SM active {sm:>3.0} %{age}")
                }
                _ if pod.phase == "ready" => "no value: none that is fresh enough".to_owned(),
                _ => "withheld: not ready".to_owned(),
            };
            vec![
                piece(format!(" {:<24} {:<8} ", pod.name, pod.node), Look::Plain),
                piece(format!("{:<8} ", pod.phase), look),
                piece(values, Look::Plain),
            ]
        })
        .collect()
}

fn event_lines(picture: &Picture, room: usize) -> Vec<Line> {
    picture
        .events
        .iter()
        .skip(picture.events.len().saturating_sub(room))
        .map(|event| {
            vec![
                piece(format!(" {}  ", clock(event.at)), Look::Dim),
                piece(event.text.clone(), Look::Plain),
            ]
        })
        .collect()
}

/// Keeps `room` lines, the last of which says how many are left out.
fn shortened(mut lines: Vec<Line>, room: usize) -> Vec<Line> {
    if lines.len() > room && room > 0 {
        let left_out = lines.len() - (room - 1);
        lines.truncate(room - 1);
        lines.push(vec![piece(format!(" … {left_out} more"), Look::Dim)]);
    } else if room == 0 {
        lines.clear();
    }
    lines
}

fn clipped(line: Line, width: usize) -> Line {
    let mut left = width;
    line.into_iter()
        .map(|part| {
            let text: String = part.text.chars().take(left).collect();
            left -= text.chars().count();
            Piece {
                text,
                look: part.look,
            }
        })
        .filter(|part| !part.text.is_empty())
        .collect()
}

/// One line that says it all, where lines cannot be redrawn.
#[must_use]
pub fn plain(picture: &Picture) -> String {
    let last = picture.last();
    let number =
        |value: Option<f64>, unit: &str| value.map_or("-".to_owned(), |value| format!("{value:.0}{unit}"));
    let mut line = clock(picture.elapsed);
    if let Some(offered) = last.offered {
        line.push_str(&format!(" offered={offered:.2}"));
    }
    line.push_str(&format!(
        " busy={} sm_active={} age={}",
        number(last.busy, "%"),
        number(last.sm_active, "%"),
        last.age.map_or("-".to_owned(), |age| format!("{age:.1}s")),
    ));
    if let Some(queue) = last.queue {
        line.push_str(&format!(" queue={queue:.0}"));
    }
    if let (Some(current), Some(desired)) = (last.current, last.desired) {
        line.push_str(&format!(" hpa={current}->{desired}"));
    }
    format!(
        "{line} ready={} loading={} | {}",
        last.ready, last.loading, picture.now
    )
}

/// Minutes and seconds.
#[must_use]
pub fn clock(seconds: f64) -> String {
    // A demo lasts hours at most.
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "small and not negative"
    )]
    let whole = seconds.max(0.0) as u64;
    format!("{:02}:{:02}", whole / 60, whole % 60)
}

#[cfg(test)]
mod tests {
    use super::super::picture::{Event, NodeRow};
    use super::*;

    fn picture() -> Picture {
        let mut picture = Picture::new(
            "real control plane, simulated GPUs",
            &["a loading replica is withheld"],
        );
        picture.target = Some(60.0);
        for at in 0..400 {
            picture.history.push_back(Sample {
                at: f64::from(at),
                offered: Some(2.31),
                busy: Some(100.0),
                sm_active: Some(62.4),
                age: Some(0.9),
                queue: Some(12.0),
                current: Some(5),
                desired: Some(6),
                ready: 5,
                loading: 1,
                answered: 5,
            });
        }
        picture.pods = (0..20)
            .map(|number| PodRow {
                name: format!("llm-{number}"),
                node: "gpu-1".into(),
                phase: if number == 0 { "loading" } else { "ready" },
                busy: (number > 0).then_some(100.0),
                sm_active: (number > 0).then_some(62.0),
                age: (number > 0).then_some(0.8),
            })
            .collect();
        picture.nodes = vec![NodeRow {
            name: "gpu-1".into(),
            exporter: "up",
            used: 3,
            gpus: 8,
        }];
        picture.events = (0..50)
            .map(|at| Event {
                at: f64::from(at),
                text: format!("event {at}"),
            })
            .collect();
        picture.links = vec!["page  http://127.0.0.1:1".into()];
        picture
    }

    fn text(lines: &[Line]) -> Vec<String> {
        lines
            .iter()
            .map(|line| line.iter().map(|part| part.text.as_str()).collect())
            .collect()
    }

    #[test]
    fn it_fits_any_terminal() {
        for (width, height) in [(1, 1), (20, 5), (80, 24), (100, 40), (300, 200)] {
            let lines = text(&lines(&picture(), width, height));
            assert!(lines.len() <= height, "{} lines in {height}", lines.len());
            assert!(lines.iter().all(|line| line.chars().count() <= width));
        }
    }

    #[test]
    fn everything_a_sceptic_looks_for_is_there() {
        let all = text(&lines(&picture(), 100, 40)).join("\n");
        for part in [
            "2.31 GPUs",
            "saturated",
            "62 % of 60 %",
            "12 requests",
            "0.9 s",
            "5 now, 6 wanted",
            "5 ready, 1 loading",
            "withheld: not ready",
            "3 of 8 GPUs",
            "event 49",
            "http://127.0.0.1:1",
        ] {
            assert!(all.contains(part), "no {part:?} in\n{all}");
        }
    }

    #[test]
    fn missing_values_are_named_not_zero() {
        let mut picture = picture();
        picture.history.push_back(Sample {
            ready: 5,
            ..Sample::default()
        });
        let all = text(&lines(&picture, 100, 40)).join("\n");
        assert!(all.contains("no value") && !all.contains(" 0 %"), "{all}");
        assert!(plain(&picture).contains("sm_active=-"));
    }

    #[test]
    fn few_rows_keep_the_readings_and_drop_pods() {
        let all = text(&lines(&picture(), 80, 24)).join("\n");
        assert!(
            all.contains("replicas") && all.contains("more") && !all.contains("llm-19"),
            "{all}"
        );
    }

    #[test]
    fn long_sentences_are_wrapped_at_spaces() {
        assert_eq!(wrapped("one two three", 7), ["one two", "three"]);
        assert_eq!(wrapped("incomprehensible", 5), ["incomprehensible"]);
        assert_eq!(wrapped("", 5), [""]);
    }

    #[test]
    fn a_gap_in_the_values_is_a_gap_in_the_plot() {
        let history: VecDeque<_> = [Some(50.0), None, Some(100.0)]
            .into_iter()
            .map(|busy| Sample {
                busy,
                ..Sample::default()
            })
            .collect();
        assert_eq!(sparkline(&history, |sample| sample.busy, 100.0, 10), "▄ █");
    }
}
