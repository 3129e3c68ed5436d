//! How fast this machine answers at all: a bare server of fixed bytes, asked beside the program under measurement.
//!
//! A p99 of milliseconds says nothing about a program when the scheduler takes as long to wake anybody. A round in
//! which the bare server was slow as well is no measurement of the program; callers measure such rounds again.

use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::thread;
use std::time::Duration;

/// A bare server's p99 on a machine with nothing else to do is below 0.3 ms; from here on others are at work.
pub const QUIET: Duration = Duration::from_micros(500);

/// A server that answers every request of one connection with the same bytes.
#[derive(Debug)]
pub struct Floor {
    /// Where it listens.
    pub addr: SocketAddr,
}

impl Floor {
    /// Starts a server of bodies with `length` bytes; its thread ends with its one connection.
    ///
    /// # Errors
    /// No port or no thread.
    pub fn start(length: usize) -> io::Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        let addr = listener.local_addr()?;
        let mut answer = format!("HTTP/1.1 200 OK\r\ncontent-length: {length}\r\n\r\n").into_bytes();
        answer.resize(answer.len() + length, b'#');
        thread::Builder::new().name("floor".to_owned()).spawn(move || {
            // An error ends the connection, which its client notices.
            let _ = listener.accept().and_then(|(stream, _)| serve(stream, &answer));
        })?;
        Ok(Self { addr })
    }
}

fn serve(mut stream: TcpStream, answer: &[u8]) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let (mut request, mut chunk) = (Vec::new(), [0; 4096]);
    loop {
        let read = stream.read(&mut chunk)?;
        if read == 0 {
            return Ok(());
        }
        request.extend_from_slice(chunk.get(..read).unwrap_or_default());
        // Requests have no body, and a client sends one only after it has its answer.
        if request.ends_with(b"\r\n\r\n") {
            request.clear();
            stream.write_all(answer)?;
        }
    }
}
