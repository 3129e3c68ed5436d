//! Shows the picture on stdout: redrawn in place on a terminal, plain lines elsewhere.
//!
//! Invariants: the terminal is given back as it was, also when the demo ends early ([`Drop`]); only lines
//! that changed are written; `NO_COLOR` is obeyed.

use std::io::{self, IsTerminal, Write};
use std::sync::Arc;
use std::time::Duration;

use crossterm::style::{Attribute, Color, Print, ResetColor, SetAttribute, SetForegroundColor};
use crossterm::terminal::{Clear, ClearType, EnterAlternateScreen, LeaveAlternateScreen};
use crossterm::{cursor, queue};
use tokio_util::sync::CancellationToken;

use super::picture::Stage;
use super::view::{self, Line, Look};

/// Time between two looks: smooth for the eye, little for the machine.
const REDRAW: Duration = Duration::from_millis(250);

/// Time between two plain lines, besides those about events.
const PLAIN: Duration = Duration::from_secs(5);

/// Draws until cancelled.
///
/// # Errors
/// When stdout cannot be written.
pub async fn show(stage: Arc<Stage>, stop: CancellationToken) -> io::Result<()> {
    if io::stdout().is_terminal() {
        redraw(&stage, &stop).await
    } else {
        print(&stage, &stop).await
    }
}

async fn redraw(stage: &Stage, stop: &CancellationToken) -> io::Result<()> {
    let mut screen = Screen::open()?;
    while !stop.is_cancelled() {
        screen.draw(stage)?;
        tokio::select! {
            () = stop.cancelled() => {}
            () = tokio::time::sleep(REDRAW) => {}
        }
    }
    screen.draw(stage)
}

async fn print(stage: &Stage, stop: &CancellationToken) -> io::Result<()> {
    let mut told = 0.0_f64;
    let mut since_plain = PLAIN;
    loop {
        let ended = stop.is_cancelled();
        let with_line = since_plain >= PLAIN;
        told = print_news(stage, told, with_line)?;
        if with_line {
            since_plain = Duration::ZERO;
        }
        if ended {
            return Ok(());
        }
        tokio::select! {
            () = stop.cancelled() => {}
            () = tokio::time::sleep(REDRAW) => {}
        }
        since_plain += REDRAW;
    }
}

/// Prints events after `told`, and the line of numbers if there are any; answers with the last event's time.
fn print_news(stage: &Stage, told: f64, with_line: bool) -> io::Result<f64> {
    let picture = stage.picture();
    let mut out = io::stdout().lock();
    for event in picture.events.iter().filter(|event| event.at > told) {
        writeln!(out, "{} {}", view::clock(event.at), event.text)?;
    }
    if with_line && !picture.history.is_empty() {
        writeln!(out, "{}", view::plain(&picture))?;
    }
    out.flush()?;
    Ok(picture.events.back().map_or(told, |event| event.at.max(told)))
}

/// The terminal's other screen, while we have it.
struct Screen {
    size: (u16, u16),
    drawn: Vec<Line>,
    color: bool,
}

impl Screen {
    fn open() -> io::Result<Self> {
        let mut out = io::stdout().lock();
        queue!(out, EnterAlternateScreen, cursor::Hide, Clear(ClearType::All))?;
        out.flush()?;
        let color = std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
        Ok(Self {
            size: (0, 0),
            drawn: Vec::new(),
            color,
        })
    }

    fn draw(&mut self, stage: &Stage) -> io::Result<()> {
        let size = crossterm::terminal::size().unwrap_or((80, 24));
        let mut out = io::stdout().lock();
        if size != self.size {
            self.size = size;
            self.drawn.clear();
            queue!(out, Clear(ClearType::All))?;
        }
        // One column stays free: at the very last one, clearing the rest of a line would take its last letter.
        let lines = view::lines(
            &stage.picture(),
            usize::from(size.0).saturating_sub(1),
            usize::from(size.1),
        );
        for (number, row) in (0..size.1).enumerate() {
            let (line, was) = (lines.get(number), self.drawn.get(number));
            if line == was {
                continue;
            }
            queue!(out, cursor::MoveTo(0, row))?;
            for part in line.into_iter().flatten() {
                self.put(&mut out, part.look, &part.text)?;
            }
            queue!(out, Clear(ClearType::UntilNewLine))?;
        }
        self.drawn = lines;
        out.flush()
    }

    fn put(&self, out: &mut impl Write, look: Look, text: &str) -> io::Result<()> {
        match look {
            Look::Bold => queue!(out, SetAttribute(Attribute::Bold))?,
            Look::Dim => queue!(out, SetAttribute(Attribute::Dim))?,
            _ => {}
        }
        let color = match look {
            Look::Good => Some(Color::Green),
            Look::Warning => Some(Color::Yellow),
            Look::Bad => Some(Color::Red),
            Look::Plot => Some(Color::Cyan),
            Look::Plain | Look::Dim | Look::Bold => None,
        };
        if let Some(color) = color.filter(|_| self.color) {
            queue!(out, SetForegroundColor(color))?;
        }
        queue!(out, Print(text), SetAttribute(Attribute::Reset))?;
        if self.color {
            queue!(out, ResetColor)?;
        }
        Ok(())
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        let mut out = io::stdout().lock();
        // Nothing can be done about a terminal that has gone away.
        let _ = queue!(out, LeaveAlternateScreen, cursor::Show);
        let _ = out.flush();
    }
}
