//! How a connection begins: each side sends its greeting, then what kind of socket it is. Who does not, or takes too long, is
//! refused.

use bytes::{Buf, Bytes, BytesMut};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::time::timeout;

use super::message::{Decoder, Incoming, command, encode_command};
use super::{HANDSHAKE, ZmtpError};

/// Length of a greeting: signature, version, mechanism, role, filler.
const GREETING: usize = 64;

/// Most bytes of a peer's READY command.
const READY: usize = 4096;

fn greeting() -> [u8; GREETING] {
    let mut greeting = [0; GREETING];
    (greeting[0], greeting[9], greeting[10]) = (0xff, 0x7f, 3);
    greeting[12..16].copy_from_slice(b"NULL");
    greeting
}

/// Name and value of a property, as READY has them.
fn property(name: &str, value: &str) -> Vec<u8> {
    let length = (value.len() as u32).to_be_bytes();
    [&[name.len() as u8], name.as_bytes(), &length, value.as_bytes()].concat()
}

fn socket_type(mut properties: &[u8]) -> Option<String> {
    while !properties.is_empty() {
        let length = usize::from(properties.get_u8());
        let (name, rest) = properties.split_at_checked(length)?;
        let (length, rest) = rest.split_first_chunk::<4>()?;
        let (value, rest) = rest.split_at_checked(u32::from_be_bytes(*length) as usize)?;
        if name.eq_ignore_ascii_case(b"Socket-Type") {
            return Some(String::from_utf8_lossy(value).into_owned());
        }
        properties = rest;
    }
    None
}

/// Introduces us as `own` and expects one of `others`; what came behind that stays in the reader.
pub(super) async fn shake<S: AsyncRead + AsyncWrite + Unpin>(
    stream: &mut S,
    own: &str,
    others: &[&str],
) -> Result<BytesMut, ZmtpError> {
    timeout(HANDSHAKE, exchange(stream, own, others)).await.map_err(|_| ZmtpError::Handshake)?
}

async fn exchange<S: AsyncRead + AsyncWrite + Unpin>(
    stream: &mut S,
    own: &str,
    others: &[&str],
) -> Result<BytesMut, ZmtpError> {
    stream.write_all(&greeting()).await?;
    let mut theirs = [0; GREETING];
    stream.read_exact(&mut theirs).await?;
    let same_mechanism = theirs[12..32] == greeting()[12..32];
    if theirs[0] != 0xff || theirs[9] & 1 == 0 || theirs[10] < 3 || !same_mechanism {
        return Err(ZmtpError::Protocol);
    }
    stream.write_all(&encode_command("READY", &property("Socket-Type", own))).await?;
    let (mut decoder, mut buffer) = (Decoder::new(READY), BytesMut::new());
    let ready = loop {
        match decoder.next(&mut buffer)? {
            Ok(Incoming::Command(body)) => break body,
            Ok(Incoming::Message(_)) => return Err(ZmtpError::Protocol),
            Err(_) if stream.read_buf(&mut buffer).await? == 0 => return Err(ZmtpError::Closed),
            Err(_) => {}
        }
    };
    let Some((b"READY", properties)) = command(&ready) else { return Err(ZmtpError::Protocol) };
    let theirs = socket_type(properties).ok_or(ZmtpError::Protocol)?;
    if others.contains(&theirs.as_str()) { Ok(buffer) } else { Err(ZmtpError::Peer(theirs)) }
}

/// The one part of the message that subscribes to `topic`, as ZMTP 3.0 has it.
pub(super) fn subscription(topic: &str) -> Bytes {
    [&[1], topic.as_bytes()].concat().into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kind_of_socket_is_found_among_other_properties() {
        let properties = [property("Identity", ""), property("socket-type", "XPUB")].concat();
        assert_eq!(socket_type(&properties).as_deref(), Some("XPUB"));
        for end in 0..properties.len() {
            assert_eq!(socket_type(&properties[..end]), None, "{end} bytes");
        }
    }
}
