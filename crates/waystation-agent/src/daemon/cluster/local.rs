//! What the trainers of this host ask for.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use tokio::task::JoinSet;
use waystation_format::slot::{Header, Key, Version};
use waystation_format::{Error, Kind, Result};

use super::mail::Place;
use super::names::Shard;
use super::{Cluster, Shared, Verification};
use crate::local::message::{Base, Beginning, HexNumber, HostStanding, Standing};
use crate::peers::{ControlClient, Credentials};
use crate::protocol::events::{Input, Refusal};
use crate::protocol::names::{AgentId, Epoch, Program};

/// How long another agent may take to say what it has.
const ASK_WITHIN: Duration = Duration::from_secs(3);
/// How often it is looked whether slots are verified.
const VERIFY_PAUSE: Duration = Duration::from_millis(2);
/// How long a save waits for the room that an older version takes, and how often it looks.
const ROOM_WITHIN: Duration = Duration::from_secs(1);
const ROOM_PAUSE: Duration = Duration::from_millis(2);

impl Cluster {
    /// The name of this host.
    pub fn host(&self) -> String {
        self.shared.ways.credentials.identity.name.to_string()
    }

    /// How many agents there are.
    pub fn agent_count(&self) -> usize {
        self.shared.places.len()
    }

    /// How things stand, as this agent knows it.
    pub fn standing(&self) -> Standing {
        let inner = self.shared.lock();
        let driver = &inner.driver;
        let name_of = |agent: &AgentId| {
            self.shared
                .places
                .get(usize::from(agent.0))
                .map_or_else(String::new, |place| place.name().to_string())
        };
        let promised = driver.agent().and_then(|agent| agent.memory().promised);
        let hosts = (0..self.shared.places.len() as u16).map(AgentId);
        let hosts =
            hosts.map(|agent| HostStanding { name: name_of(&agent), is_heard: driver.is_heard(agent) });
        let standing = Standing {
            epoch: promised.map_or(0, Epoch::packed),
            hosts: hosts.collect(),
            ..Standing::default()
        };
        let Some(orders) = driver.orders() else { return standing };
        let base = orders.base.map(|base| Base {
            epoch: base.version.epoch.packed(),
            step: base.version.step,
            shard_count: base.shard_count,
            sequence: HexNumber(orders.program.sequence),
        });
        let version = |version: crate::protocol::names::Version| super::names::slot_version(version).into();
        Standing {
            program: orders.program.token,
            is_training: true,
            is_open: orders.is_open,
            base,
            commits: orders.commits.iter().map(|commit| version(commit.version)).collect(),
            doubted: orders.doubted.iter().copied().map(version).collect(),
            lost: orders.lost.map(version),
            holders: orders.holders.iter().map(|holders| holders.iter().map(name_of).collect()).collect(),
            ..standing
        }
    }

    /// Begins a program.
    pub fn begin(&self, beginning: Beginning) -> Result<()> {
        let mut inner = self.shared.lock();
        let hosts = inner.driver.hosts();
        let owner = |name: &String| {
            hosts.agent(name).ok_or_else(|| {
                let message =
                    "a process of the program is on a host that the file of the hosts does not name";
                Error::new(Kind::InvalidInput, message).with("host", &**name)
            })
        };
        let owners: Vec<AgentId> = beginning.owners.iter().map(owner).collect::<Result<_>>()?;
        if owners.is_empty() || beginning.program == 0 {
            return Err(Error::new(Kind::InvalidInput, "a program has processes, and a token other than 0"));
        }
        let Beginning { program: token, sequence: HexNumber(sequence), .. } = beginning;
        let effects = inner.driver.begin(Program { token, sequence, owners })?;
        self.shared.carry_out(&mut inner, effects);
        Ok(())
    }

    /// As [`Cluster::check`], but waits a while for room. A save that failed on one host is still in slots of the others,
    /// until agents hear that the host has gone on to this version, and give that up. Were it refused at once, this
    /// version would lack those others' shards, and the next one that host's again, and none would ever be whole.
    /// Cancelled if who asks has left meanwhile: nobody would write to what it was given, or give it back.
    pub fn await_room(&self, shard: &str, version: Version, is_there: &dyn Fn() -> bool) -> Result<()> {
        let key = named(shard)?.key(version);
        let until = Instant::now() + ROOM_WITHIN;
        let is_full = || {
            let inner = self.shared.lock();
            inner.driver.agent().and_then(|agent| agent.refusal_of(key)) == Some(Refusal::Full)
        };
        while is_full() && Instant::now() < until && is_there() {
            thread::sleep(ROOM_PAUSE);
        }
        if !is_there() {
            return Err(Error::new(
                Kind::Cancelled,
                "whoever asked for a slot does not wait for it any more",
            ));
        }
        self.check(shard, version)
    }

    /// Whether a version that a trainer wants to save would be kept now; makes room for it.
    pub fn check(&self, shard: &str, version: Version) -> Result<()> {
        let key = named(shard)?.key(version);
        let refusal = self.shared.lock().driver.agent().map(|agent| agent.refusal_of(key));
        match refusal {
            None => Err(Error::new(
                Kind::Unavailable,
                "the agents have not all found each other yet; save again later",
            )),
            // The same version may be sealed again where the answer was lost.
            Some(None | Some(Refusal::Conflict)) => {
                self.shared.make_room();
                Ok(())
            }
            Some(Some(refusal)) => Err(refused(refusal, shard, version)),
        }
    }

    /// A trainer has sealed a slot: an error if it is not kept, and the slot is free then.
    pub fn sealed(&self, slot: &Header, shard: &str, version: Version, digest: u64) -> Result<()> {
        let name = named(shard)?;
        let mut inner = self.shared.lock();
        let effects = inner.driver.happen(Input::Sealed(name.key(version), name.copy(digest)));
        let refused_keys = self.shared.carry_out(&mut inner, effects);
        let refusal = refused_keys.into_iter().find(|(key, _)| *key == name.key(version));
        let is_blank = inner.driver.agent().is_none();
        drop(inner);
        let error = match refusal {
            Some((_, refusal)) => refused(refusal, shard, version),
            None if is_blank => Error::new(Kind::Fenced, "no program has begun with the agents of its hosts"),
            None => return Ok(()),
        };
        self.shared.store.release(slot)?;
        Err(error)
    }

    /// Verifies all slots, and lets go of what is damaged, for it to be brought again.
    pub fn verify(&self) {
        self.shared.verify(&mut self.shared.lock());
        while self.shared.lock().verification != Verification::Idle {
            thread::sleep(VERIFY_PAUSE);
        }
    }

    /// Has a version brought here, and waits for a while; false if it is still on its way.
    ///
    /// NotFound if no agent has it.
    pub fn bring(&self, key: &Key, time: Duration) -> Result<bool> {
        let shared = &self.shared;
        named(&key.shard)?;
        let running = shared.running.get();
        let running = running
            .ok_or_else(|| Error::new(Kind::Unavailable, "the agent has only just begun; ask again"))?;
        if shared.guests.begin(key) {
            let (fetching, wanted) = (Arc::clone(shared), key.clone());
            running.runtime.spawn(async move {
                let outcome = fetching.fetch_from_any(&wanted).await;
                fetching.guests.end(&wanted, outcome);
            });
        }
        shared.guests.wait(key, time).transpose().map(|outcome| outcome.is_some())
    }
}

impl Shared {
    /// Fetches a version from whoever has it.
    async fn fetch_from_any(self: &Arc<Self>, key: &Key) -> Result<()> {
        let mut asked = JoinSet::new();
        let others = self.places.iter().zip(0u16..).filter(|(_, agent)| *agent != self.id.0);
        for (place, _) in others {
            asked.spawn(digest_at(Arc::clone(place), self.ways.credentials.clone(), key.clone()));
        }
        let mut failure = None;
        while let Some(answer) = asked.join_next().await {
            let answer: Result<_> = answer.unwrap_or_else(|_| Err(waystation_io::job::panicked()));
            let fetched = match answer {
                Ok((place, Some(digest))) => {
                    self.make_room();
                    self.ways.fetch(&self.intake, key, digest, &place).await
                }
                Ok((_, None)) => continue,
                Err(error) => Err(error),
            };
            match fetched {
                Ok(()) => return Ok(()),
                Err(error) => failure = Some(error),
            }
        }
        let nowhere = || {
            Error::new(Kind::NotFound, "no agent has this version of the shard")
                .with("shard", &*key.shard)
                .with("epoch", key.version.epoch.to_string())
                .with("step", key.version.step.to_string())
        };
        Err(failure.unwrap_or_else(nowhere))
    }
}

/// The digest that a version has with another agent, if that has it.
async fn digest_at(
    place: Arc<Place>,
    credentials: Credentials,
    key: Key,
) -> Result<(Arc<Place>, Option<u64>)> {
    let client = ControlClient::new(place.peer().await?, credentials, ASK_WITHIN);
    let found = client.find(&key).await?;
    Ok((place, found))
}

fn named(shard: &str) -> Result<Shard> {
    Shard::parse(shard).ok_or_else(|| {
        let message =
            "where agents of several hosts keep shards, these are called <sequence>/<number>-of-<count>";
        Error::new(Kind::InvalidInput, message).with("shard", shard)
    })
}

fn refused(refusal: Refusal, shard: &str, version: Version) -> Error {
    let (kind, message) = match refusal {
        Refusal::Fenced => {
            (Kind::Fenced, "the epoch of the version is over, or a newer start of the program has taken over")
        }
        Refusal::Full => (
            Kind::Unavailable,
            "there is no room until an older version is committed or given up; save again later",
        ),
        Refusal::Late => {
            (Kind::Cancelled, "the version was given up: not all of its shards had their copies in time")
        }
        Refusal::Conflict => (
            Kind::Conflict,
            "this shard of this version is here with other bytes, or is none of the program's",
        ),
    };
    Error::new(kind, message)
        .with("shard", shard)
        .with("epoch", version.epoch.to_string())
        .with("step", version.step.to_string())
}
