//! A paired site that breaks the protocol of copies in many ways:
//!
//!     hostile_peer ADDRESS CODE MACHINE
//!
//! It pairs, and waits for a line on standard input before each attack. Afterwards it prints what the other side said last,
//! as JSON. MACHINE has a point there. Protocol: server/replica/src/remote/messages.rs; it is written here once more, so that
//! nothing of what is tested is used.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use coldrise_block::{Error, ErrorKind, Result};
use coldrise_line::{
    Class, Frame, Identity, Line, LineOptions, PairingCode, PeerKey, Received, TcpLine, connect,
    pair_with,
};
use serde_json::{Value, json};

#[path = "hostile_peer/attacks.rs"]
mod attacks;

const PART: u8 = 1;
const MESSAGE: u8 = 2;
const NAMES: u8 = 3;
const WANTED: u8 = 4;
const APPLIED: u8 = 5;
const CONTENT: u8 = 6;
const WHOLE: u8 = 7;
/// Codings of content.
const STREAM: u8 = 0;
const DELTA: u8 = 1;

/// How long an answer may take.
const LONG: Duration = Duration::from_secs(20);
/// How long nothing must come before the other side counts as silent.
const SHORT: Duration = Duration::from_secs(2);
/// Versions of the protocol that are tried.
const VERSIONS: std::ops::Range<u32> = 1..64;

fn main() -> std::result::Result<(), String> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [address, code, machine] = &arguments[..] else {
        return Err("see the comment at the top of the source".to_owned());
    };
    attack(address, code, machine).map_err(|error| error.full_message())
}

fn attack(address: &str, code: &str, machine: &str) -> Result<()> {
    let identity = Identity::generate()?;
    let peer = pair_with(address, &identity, &code.parse::<PairingCode>()?)?;
    println!("paired");
    let mut site = Site { address, identity, peer, machine, version: 0, chunk_bytes: 0 };
    site.find_version()?;
    for (name, attack) in attacks::ALL {
        let mut go = String::new();
        std::io::stdin()
            .read_line(&mut go)
            .map_err(|error| Error::io("reading standard input", error))?;
        if go.is_empty() {
            return Ok(());
        }
        let said = site.line().and_then(|talk| attack(&site, &talk));
        let said = said.unwrap_or_else(|error| format!("failed here: {}", error.full_message()));
        println!("{}", json!({ "attack": name, "said": said }));
    }
    Ok(())
}

/// The site that is attacked.
struct Site<'a> {
    address: &'a str,
    identity: Identity,
    peer: PeerKey,
    machine: &'a str,
    version: u32,
    chunk_bytes: usize,
}

/// One line to it, and how many parts of its stream of content were sent.
struct Talk(TcpLine, AtomicU32);

/// What came.
enum Reply {
    Message(Value),
    Frame(u8),
    Silence,
    End(String),
}

impl Site<'_> {
    fn connect(&self) -> Result<Talk> {
        connect(self.address, &self.identity, self.peer, &LineOptions::default())
            .map(|line| Talk(line, AtomicU32::new(0)))
    }

    fn find_version(&mut self) -> Result<()> {
        for version in VERSIONS {
            let talk = self.connect()?;
            let welcome = talk.hello(version)?;
            if let Some(bytes) = welcome["welcome"]["chunk_size_bytes"].as_u64() {
                (self.version, self.chunk_bytes) = (version, bytes as usize);
                return Ok(());
            }
        }
        Err(Error::new(ErrorKind::Unsupported, "no version of the protocol was understood"))
    }

    /// A line after the greetings.
    fn line(&self) -> Result<Talk> {
        let talk = self.connect()?;
        talk.hello(self.version)?;
        Ok(talk)
    }

    /// Claims the machine, which the line of the last attack may still hold.
    fn claim(&self, talk: &Talk) -> Result<()> {
        let until = std::time::Instant::now() + LONG;
        while talk.ask(&json!({ "claim": { "machine": self.machine } }))? != "claimed" {
            if std::time::Instant::now() > until {
                return Err(Error::new(ErrorKind::Busy, "the machine stays claimed"));
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(())
    }

    /// The point there.
    fn point(&self, talk: &Talk) -> Result<Value> {
        let answer = talk.ask(&json!({ "points": { "machine": self.machine } }))?;
        match answer["points"]["points"].get(0) {
            Some(point) => Ok(point.clone()),
            None => Err(Error::new(ErrorKind::NotFound, format!("no point: {answer}"))),
        }
    }

    /// Begins a disk with this number of pieces.
    fn start(&self, talk: &Talk, pieces: usize) -> Result<()> {
        let size = pieces * self.chunk_bytes;
        talk.ask(&json!({ "start": { "base": null, "size_bytes": size } })).map(|_| ())
    }

    /// Offers pieces one after the other from `offset`, in pieces, and waits until they are wanted: content that
    /// arrives before its names is passed over.
    fn offer(&self, talk: &Talk, number: u32, offset: usize, pieces: &[&[u8]]) -> Result<()> {
        let runs = [((offset * self.chunk_bytes) as u64, pieces.len() as u32)];
        talk.names(number, &runs, pieces.iter().map(|piece| *blake3::hash(piece).as_bytes()))?;
        match talk.hear(LONG) {
            Reply::Frame(_) => Ok(()),
            _ => Err(Error::new(ErrorKind::Corrupt, "pieces were not wanted")),
        }
    }
}

impl Talk {
    fn hello(&self, version: u32) -> Result<Value> {
        self.ask(&json!({ "hello": { "version": version, "repository": "07".repeat(16) } }))
    }

    fn frame(&self, class: Class, kind: u8, body: Vec<u8>) -> Result<()> {
        self.0.send(class, Frame { stream: 0, kind, body })
    }

    fn tell(&self, message: &Value) -> Result<()> {
        self.tell_with(message, &[])
    }

    fn tell_with(&self, message: &Value, attachment: &[u8]) -> Result<()> {
        let json = message.to_string().into_bytes();
        let mut body = (json.len() as u32).to_le_bytes().to_vec();
        body.extend(json);
        body.extend(attachment);
        self.frame(Class::Control, MESSAGE, body)
    }

    fn ask(&self, message: &Value) -> Result<Value> {
        self.ask_with(message, &[])
    }

    fn ask_with(&self, message: &Value, attachment: &[u8]) -> Result<Value> {
        self.tell_with(message, attachment)?;
        match self.hear(LONG) {
            Reply::Message(answer) => Ok(answer),
            Reply::End(why) => Err(Error::new(ErrorKind::Io, why)),
            Reply::Frame(kind) => {
                Err(Error::new(ErrorKind::Corrupt, format!("a frame of kind {kind}")))
            }
            Reply::Silence => Err(Error::new(ErrorKind::Io, "no answer")),
        }
    }

    fn names(
        &self,
        number: u32,
        runs: &[(u64, u32)],
        names: impl Iterator<Item = [u8; 32]>,
    ) -> Result<()> {
        let mut body = number.to_le_bytes().to_vec();
        body.extend((runs.len() as u32).to_le_bytes());
        for (offset, count) in runs {
            body.extend(offset.to_le_bytes());
            body.extend(count.to_le_bytes());
        }
        names.for_each(|name| body.extend(name));
        self.frame(Class::Control, NAMES, body)
    }

    /// Content of these places, packed: the next part of a stream.
    fn bring(&self, number: u32, places: &[u16], packed: &[u8]) -> Result<()> {
        let sequence = self.1.fetch_add(1, Ordering::Relaxed);
        self.bring_coded(number, places, 0, sequence, packed)
    }

    fn bring_coded(
        &self,
        number: u32,
        places: &[u16],
        coding: u8,
        sequence: u32,
        packed: &[u8],
    ) -> Result<()> {
        let mut body = number.to_le_bytes().to_vec();
        body.extend((places.len() as u32).to_le_bytes());
        places.iter().for_each(|place| body.extend(place.to_le_bytes()));
        body.push(coding);
        body.extend(sequence.to_le_bytes());
        body.extend(packed);
        self.frame(Class::Bulk, CONTENT, body)
    }

    fn hear(&self, limit: Duration) -> Reply {
        let mut message = Vec::new();
        loop {
            let frame = match self.0.receive(&[Class::Control], limit) {
                Ok(Received::Frame { frame, .. }) => frame,
                Ok(Received::Nothing) => return Reply::Silence,
                Ok(Received::Closed) => return Reply::End("closed".to_owned()),
                Err(error) => return Reply::End(error.full_message()),
            };
            match frame.kind {
                PART | MESSAGE => {
                    message.extend(frame.body);
                    if frame.kind == MESSAGE {
                        let length =
                            message.first_chunk().map_or(0, |length| u32::from_le_bytes(*length));
                        let json = message.get(4..4 + length as usize).unwrap_or_default();
                        return Reply::Message(serde_json::from_slice(json).unwrap_or_default());
                    }
                }
                kind => return Reply::Frame(kind),
            }
        }
    }

    /// The other side's last words: an answer, or what came last before it was silent.
    fn last_words(&self) -> String {
        let mut last = "nothing".to_owned();
        loop {
            // After it was wanted it is applied or refused, on a busy machine later.
            match self.hear(if last == "wanted" { LONG } else { SHORT }) {
                Reply::Message(answer) => {
                    let refusal = answer["failed"]["message"].as_str();
                    return refusal
                        .map_or_else(|| answer.to_string(), |text| format!("refused: {text}"));
                }
                Reply::Frame(WANTED) => last = "wanted".to_owned(),
                Reply::Frame(APPLIED) => last = "applied".to_owned(),
                Reply::Frame(kind) => last = format!("a frame of kind {kind}"),
                Reply::Silence => return last,
                Reply::End(why) if last == "nothing" => return why,
                Reply::End(_) => return last,
            }
        }
    }

    /// What comes until a batch is applied.
    fn until_applied(&self) -> String {
        loop {
            match self.hear(LONG) {
                Reply::Frame(APPLIED) => return "applied".to_owned(),
                Reply::Frame(_) => {}
                Reply::Message(answer) => return answer.to_string(),
                Reply::Silence => return "nothing".to_owned(),
                Reply::End(why) => return why,
            }
        }
    }

    /// As [`Talk::last_words`], after something was sent; the line may be closed already.
    fn answered(&self, sent: Result<()>) -> String {
        match self.last_words() {
            words if words == "nothing" => {
                sent.map_or_else(|error| error.full_message(), |()| words)
            }
            words => words,
        }
    }
}
