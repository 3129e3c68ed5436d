//! Both formats: what is read, what is refused and how it is named, and agreement with another parser.

use super::*;
use proptest::prelude::*;

type Row = (String, Vec<(String, String)>, f64, Option<i64>);

fn rows(format: &dyn Exposition, body: &[u8]) -> Result<Vec<Row>, ParseError> {
    let mut rows = Vec::new();
    format.parse(body, &mut |sample| {
        let labels = sample
            .labels
            .iter()
            .map(|label| (label.key.to_owned(), label.value.to_string()))
            .collect();
        rows.push((sample.name.to_owned(), labels, sample.value, sample.timestamp_ms));
    })?;
    Ok(rows)
}

fn text(body: &str) -> Result<Vec<Row>, ParseError> {
    rows(&PrometheusText, body.as_bytes())
}

fn open(body: &str) -> Result<Vec<Row>, ParseError> {
    rows(&OpenMetrics, body.as_bytes())
}

#[test]
fn label_values_keep_commas_braces_and_escapes() {
    let rows = text("m{x=\"p,q\",y=\"a\\\"b\\\\c\\nd\",z=\"{}=,#\",u=\"é✓\"} 1.5 1700000000000\n").unwrap();
    let (name, labels, value, timestamp) = &rows[0];
    assert_eq!(name, "m");
    let expected = [("x", "p,q"), ("y", "a\"b\\c\nd"), ("z", "{}=,#"), ("u", "é✓")];
    let expected: Vec<_> = expected.map(|(k, v)| (k.to_owned(), v.to_owned())).into();
    assert_eq!(labels, &expected);
    assert!((value - 1.5).abs() < f64::EPSILON);
    assert_eq!(*timestamp, Some(1_700_000_000_000));
}

#[test]
fn plain_values_are_not_copied() {
    let body = "m{a=\"plain\",b=\"esc\\\\aped\"} 1\n";
    let mut seen = Vec::new();
    PrometheusText
        .parse(body.as_bytes(), &mut |sample| {
            seen = sample
                .labels
                .iter()
                .map(|label| matches!(label.value, Cow::Borrowed(_)))
                .collect();
        })
        .unwrap();
    assert_eq!(seen, [true, false]);
}

#[test]
fn numbers_of_every_shape_are_read() {
    let body = "a NaN\na +Inf\na -Inf\na 1e-3\na -0\na 12345678901234567890\na 0.1\n";
    let values: Vec<f64> = text(body).unwrap().into_iter().map(|row| row.2).collect();
    assert!(values[0].is_nan());
    let expected = [
        f64::INFINITY,
        f64::NEG_INFINITY,
        0.001,
        0.0,
        12_345_678_901_234_567_890.0,
        0.1,
    ];
    for (value, expected) in values[1..].iter().zip(expected) {
        assert_eq!(value.partial_cmp(&expected), Some(std::cmp::Ordering::Equal));
    }
}

#[test]
fn text_allows_what_the_format_allows() {
    let body = "\n# just a comment\n#TYPE\n# HELP a some \\n help\n# TYPE a gauge\n  a \t{ x = \"1\" , } 2 \n\na{} 3\n# EOF\n";
    assert_eq!(text(body).unwrap().len(), 2);
    assert_eq!(text("").unwrap().len(), 0);
}

#[test]
fn text_names_the_bad_line_and_rejects_the_body() {
    for (body, line, fragment) in [
        ("a 1\nb 2", 2, "cut short"),
        ("a 1\nb{x=\"1\n", 2, "closing quote is missing"),
        ("a 1\n\nb{x=\"1\"}\n", 3, "value is missing"),
        ("a\n", 1, "blank before the value"),
        ("a{x=\"1\",x=\"2\"} 1\n", 1, "label x is given twice"),
        ("a{1x=\"1\"} 1\n", 1, "expected a label name"),
        ("a{x='1'} 1\n", 1, "expected '\"'"),
        ("a{x=\"1\"y=\"2\"} 1\n", 1, "expected ',' or '}'"),
        ("a{x=\"\\t\"} 1\n", 1, "may follow a backslash"),
        ("a 1.2.3\n", 1, "value '1.2.3' is not a number"),
        ("a 1 2.5\n", 1, "timestamp '2.5'"),
        ("a 1 2 3\n", 1, "after the timestamp"),
        ("1a 1\n", 1, "expected a metric name"),
        ("<html>\n", 1, "expected a metric name"),
        ("{\"a.b\"} 1\n", 1, "in quotes"),
        ("# TYPE a gauge\n# TYPE a gauge\n", 2, "given twice"),
        ("# HELP a x\n# HELP a y\n", 2, "given twice"),
        ("a 1\n# TYPE a gauge\n", 2, "after samples"),
        ("# TYPE a gouge\n", 1, "none of counter"),
        ("a-b 1\n", 1, "blank before the value"),
    ] {
        let error = text(body).expect_err(body);
        assert_eq!(error.line, line, "{body:?}: {error}");
        assert!(error.cause.contains(fragment), "{body:?}: {error}");
    }
    let error = rows(&PrometheusText, b"a 1\nb{x=\"\xff\"} 1\n").unwrap_err();
    assert_eq!((error.line, error.cause.as_str()), (2, "not UTF-8"));
}

#[test]
fn a_complaint_is_short_whatever_the_line_holds() {
    let long = "x".repeat(1 << 20);
    for body in [
        format!("{long}\n"),
        format!("a {long}\n"),
        format!("a{{{long}\n"),
        format!("a{{{long}=\"1\",{long}=\"2\"}} 1\n"),
        format!("a 1 {long}\n"),
        format!("# TYPE {long} {long}\n"),
        format!("a {}\n", "é".repeat(1000)),
    ] {
        for error in [text(&body).unwrap_err(), open(&body).unwrap_err()] {
            assert!(error.to_string().chars().count() < 300, "{}", error.line);
            assert_eq!(error.line, 1);
        }
    }
}

#[test]
fn openmetrics_is_read_with_exemplars_and_seconds() {
    let body = "# TYPE r counter\n# HELP r Requests.\n# UNIT r\n".replace("# UNIT r\n", "")
        + "r_total{a=\"b\"} 17 1520879607.789 # {trace_id=\"abc\"} 0.5 1520879607.1\nr_created{a=\"b\"} 1\n\
           # TYPE h histogram\nh_bucket{le=\"1\"} 8 # {} 0.67\nh_count 8\nh_sum 3\n# TYPE g gauge\ng 1e3\nplain NaN\n# EOF\n";
    let rows = open(&body).unwrap();
    assert_eq!(rows.len(), 7);
    assert_eq!(rows[0].3, Some(1_520_879_607_789));
    assert_eq!(open("# EOF").unwrap().len(), 0);
}

#[test]
fn openmetrics_names_the_bad_line_and_rejects_the_body() {
    for (body, line, fragment) in [
        ("a 1\n", 2, "# EOF is missing"),
        ("a 1", 1, "cut short"),
        ("a 1\n# EOF\na 2\n", 3, "after # EOF"),
        ("\n# EOF\n", 1, "empty lines"),
        ("# hello\n# EOF\n", 1, "none of TYPE"),
        ("a  1\n# EOF\n", 1, "value"),
        ("a{x=\"1\",} 1\n# EOF\n", 1, "expected a label name"),
        ("a 1\nb 1\na 2\n# EOF\n", 3, "interleaved"),
        ("# TYPE a counter\na 1\n# EOF\n", 2, "must end in _total"),
        ("a 1 x\n# EOF\n", 1, "timestamp"),
        ("a 1 # x\n# EOF\n", 1, "exemplar"),
        ("a 1 1e300\n# EOF\n", 1, "timestamp"),
        ("# UNIT a_b bytes\n# EOF\n", 1, "does not end in _bytes"),
    ] {
        let error = open(body).expect_err(body);
        assert_eq!(error.line, line, "{body:?}: {error}");
        assert!(error.cause.contains(fragment), "{body:?}: {error}");
    }
}

#[test]
fn the_content_type_picks_the_reader() {
    let open = for_content_type(Some("application/openmetrics-text; version=1.0.0; charset=utf-8")).unwrap();
    assert!(open.parse(b"# EOF\n", &mut |_| {}).is_ok());
    assert!(open.parse(b"", &mut |_| {}).is_err());
    for content_type in [None, Some("text/plain"), Some("text/plain; version=0.0.4")] {
        assert!(
            for_content_type(content_type)
                .unwrap()
                .parse(b"", &mut |_| {})
                .is_ok()
        );
    }
    for content_type in [
        "text/html",
        "application/vnd.google.protobuf; encoding=delimited",
        "nonsense",
    ] {
        assert!(for_content_type(Some(content_type)).is_none(), "{content_type}");
    }
}

/// Writes a body from rows, escaping as the format asks.
fn written(rows: &[Row]) -> String {
    use std::fmt::Write as _;
    let mut body = String::new();
    for (name, labels, value, timestamp) in rows {
        body.push_str(name);
        if !labels.is_empty() {
            let pairs: Vec<_> = labels
                .iter()
                .map(|(key, value)| {
                    let value = value
                        .replace('\\', "\\\\")
                        .replace('"', "\\\"")
                        .replace('\n', "\\n");
                    format!("{key}=\"{value}\"")
                })
                .collect();
            write!(body, "{{{}}}", pairs.join(",")).unwrap();
        }
        write!(body, " {value}").unwrap();
        if let Some(timestamp) = timestamp {
            write!(body, " {timestamp}").unwrap();
        }
        body.push('\n');
    }
    body
}

fn any_row(values: &'static str) -> impl Strategy<Value = Row> {
    let labels = proptest::collection::btree_map("[a-z_][a-z0-9_]{0,6}", values, 0..5);
    (
        "[a-z_:][a-z0-9_:]{0,12}",
        labels,
        -1e9_f64..1e9,
        proptest::option::of(0_i64..2_000_000_000_000),
    )
        .prop_map(|(name, labels, value, timestamp)| (name, labels.into_iter().collect(), value, timestamp))
}

proptest! {
    #[test]
    fn what_is_written_is_read_back(rows in proptest::collection::vec(any_row("\\PC{0,12}|[a,{}\"\\\\\n]{0,8}"), 0..12)) {
        prop_assert_eq!(text(&written(&rows)).unwrap(), rows);
    }

    #[test]
    fn every_cut_of_a_body_is_refused(rows in proptest::collection::vec(any_row("[a-z]{0,4}"), 1..4), cut in 1_usize..200) {
        let body = written(&rows);
        let kept = body.len().saturating_sub(cut);
        let cut = &body[..kept];
        // A cut exactly after a line feed is a shorter body; only a length or # EOF could tell.
        prop_assert_eq!(text(cut).is_ok(), cut.is_empty() || cut.ends_with('\n'));
    }

    #[test]
    fn no_bytes_panic(body in proptest::collection::vec(any::<u8>(), 0..200)) {
        let _ = rows(&PrometheusText, &body);
        let _ = rows(&OpenMetrics, &body);
    }

    #[test]
    fn near_misses_never_panic(body in "[a{}=\"\\\\, \t#\n1.eETYPHLNaOF-]{0,80}") {
        let _ = text(&body);
        let _ = open(&body);
    }

    #[test]
    fn agrees_with_prometheus_parse_on_simple_bodies(rows in proptest::collection::vec(any_row("[a-zA-Z0-9./-]{1,8}"), 0..12)) {
        // The oracle mis-reads commas and escapes in label values, so it only sees simple ones.
        let rows: Vec<Row> = rows.into_iter().map(|(n, l, v, _)| (n.replace(':', "_"), l, v, None)).collect();
        let body = written(&rows);
        let oracle = prometheus_parse::Scrape::parse(body.lines().map(|line| Ok(line.to_owned()))).unwrap();
        let mine = text(&body).unwrap();
        prop_assert_eq!(mine.len(), oracle.samples.len());
        for (mine, theirs) in mine.iter().zip(&oracle.samples) {
            prop_assert_eq!(&mine.0, &theirs.metric);
            let prometheus_parse::Value::Untyped(value) = theirs.value else { panic!("{theirs:?}") };
            prop_assert!((mine.2 - value).abs() <= f64::EPSILON * value.abs());
            for (key, value) in &mine.1 {
                prop_assert_eq!(theirs.labels.get(key), Some(value.as_str()));
            }
        }
    }
}
