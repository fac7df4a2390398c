//! The agent among those of other hosts: together they keep copies of what each host's trainers save.
//!
//! | file | what it holds |
//! |---|---|
//! | `options`, `hosts`, `names` | what there is: other agents, and what slots and the protocol call things |
//! | `founding`, `notes` | what an agent knows when it begins, and remembers |
//! | `driver` | the protocol's machines, to which one thing happens after the other |
//! | `effects` | what they want done, done |
//! | `mail`, `transfers`, `admission` | messages out, copies out, copies in |
//! | `guests`, `local` | what the trainers of this host ask for |
//! | `watch` | what those are told who watch |
//!
//! Failures: killed at any time (what it remembers was written before anybody was told; copies are in slots; what was being
//! received is freed; the next agent goes on); its directory lost (it says so, and is admitted once a majority or all know); no
//! memory for its notes (nothing leaves the host until they are written). Invariants: nothing that waits is done while the
//! machines are locked; a slot that the machine counts as a copy is freed only when it says so.

mod admission;
mod driver;
mod effects;
mod founding;
mod guests;
mod hosts;
mod local;
mod mail;
mod names;
mod notes;
mod options;
mod transfers;
mod watch;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use tokio::runtime::Handle;
use tokio::time::{MissedTickBehavior, interval};
use waystation_format::slot::{self, State, Writer};
use waystation_format::{Error, Kind, Result};

use self::admission::Door;
use self::driver::{Driver, Role};
use self::guests::Guests;
use self::hosts::{Hosts, HostsFile};
use self::mail::{Letter, Outbox, Place};
use self::names::{Shard, copy_in};
use self::notes::Notes;
pub use self::options::{Options, TlsFiles};
use self::transfers::{Transfers, Ways};
use self::watch::Recoveries;
pub use self::watch::{Recovery, Watched};
use crate::daemon::log;
use crate::peers::bulk::{self, BulkService, Intake, Order, Pacer};
use crate::peers::{ControlService, Credentials, Encryption, Identity, Limits, Name, Server, Services};
use crate::process;
use crate::protocol::controller::Settings;
use crate::protocol::election::Patience;
use crate::protocol::memory;
use crate::protocol::names::{AgentId, Key};
use crate::store::Store;

/// How often machines are told that time has passed.
const TICK: Duration = Duration::from_millis(200);
/// Every how many ticks it is looked whether hosts are elsewhere.
const HOSTS_EVERY: u32 = 5;
/// What goes to another agent at a time, where it is not known what the link carries.
const CHUNK_BYTES: u64 = 4 << 20;
/// Where it is: so much as goes in a twentieth of this.
const CHUNK_TIME: Duration = Duration::from_millis(200);
/// How long the writer of a slot may stand still that is being sent.
const STALL: Duration = Duration::from_secs(30);
/// A version with which so many programs have begun in vain is in doubt.
const FRUITLESS_LIMIT: u32 = 2;

/// An agent that takes part.
#[derive(Debug)]
pub struct Cluster {
    shared: Arc<Shared>,
    _server: Server,
}

/// What all threads have in common.
#[derive(Debug)]
struct Shared {
    id: AgentId,
    store: Arc<Store>,
    intake: Arc<Intake>,
    /// This process, as the writer of what comes in.
    writer: Writer,
    places: Vec<Arc<Place>>,
    ways: Ways,
    transfers: Arc<Transfers>,
    guests: Guests,
    running: OnceLock<Running>,
    inner: Mutex<Inner>,
    begin: Instant,
}

/// What is there once the agent listens.
#[derive(Debug)]
struct Running {
    runtime: Handle,
    /// None in this agent's own place.
    outboxes: Vec<Option<Arc<Outbox>>>,
}

/// What is done in order.
#[derive(Debug)]
struct Inner {
    driver: Driver,
    /// Copies that are to be freed, and could not be: they are being sent.
    unfreed: BTreeSet<Key>,
    /// Notes that could not be written.
    unwritten: Option<Notes>,
    verification: Verification,
    recoveries: Recoveries,
}

/// Whether slots are being verified.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verification {
    Idle,
    Running,
    /// It was asked for again meanwhile, so what is found now is not the answer.
    Outdated,
}

impl Cluster {
    /// Takes part with a store, which from now on is shared.
    pub fn start(options: &Options, store: Arc<Store>) -> Result<Self> {
        let (hosts_file, hosts) = HostsFile::read(&options.hosts)?;
        check(options, &hosts)?;
        let id = hosts.agent(&options.host).ok_or_else(|| {
            Error::new(Kind::InvalidInput, "the file of the hosts does not name this one")
                .with("host", &*options.host)
                .with("path", options.hosts.display().to_string())
        })?;
        store.share();
        let record = store.record();
        let identity = Identity { name: Name::new(&*options.host)?, run: record.run };
        let credentials = Credentials { identity, tls: options.tls()?, encryption: Encryption::default() };
        let pacer = Pacer::new();
        let mut chunk_bytes = CHUNK_BYTES;
        if let Some((bytes_per_s, share)) = options.link {
            pacer.limit(bytes_per_s, share)?;
            chunk_bytes = bulk::chunk_bytes(CHUNK_TIME, Duration::ZERO, bytes_per_s);
        }
        let order = Order { chunk_bytes, pacer: Arc::clone(&pacer), stall: STALL };
        let ways = Ways { credentials, order: order.clone() };
        let intake = Arc::new(Intake::new(Arc::clone(&store))?);
        let places = hosts.names.iter().zip(&hosts.addresses);
        let shared = Arc::new(Shared {
            id,
            writer: process::current()?,
            places: places.map(|(name, address)| Place::new(name.clone(), address.clone())).collect(),
            transfers: Transfers::new(Arc::clone(&store), ways.clone()),
            ways,
            intake: Arc::clone(&intake),
            guests: Guests::default(),
            running: OnceLock::new(),
            inner: Mutex::new(Inner {
                driver: driver_of(options, id, hosts, &store)?,
                unfreed: BTreeSet::new(),
                unwritten: None,
                verification: Verification::Idle,
                recoveries: Recoveries::default(),
            }),
            store,
            begin: Instant::now(),
        });
        let server = shared.serve(options, intake, order)?;
        shared.run(server.runtime(), hosts_file);
        Ok(Self { shared, _server: server })
    }
}

/// Whether there are others, and enough of them.
fn check(options: &Options, hosts: &Hosts) -> Result<()> {
    let count = hosts.names.len();
    let message = if count < 2 {
        "an agent has no others to keep copies with; leave --listen and what goes with it out, or name them in the file"
            .to_owned()
    } else if options.copies as usize > count {
        format!("{} copies of each shard cannot be kept by {count} hosts", options.copies)
    } else {
        return Ok(());
    };
    Err(Error::new(Kind::InvalidInput, message).with("path", options.hosts.display().to_string()))
}

/// The machines, with what is remembered and what is in the slots.
fn driver_of(options: &Options, id: AgentId, hosts: Hosts, store: &Store) -> Result<Driver> {
    let boot = process::current()?.boot;
    let notes = store.notes().and_then(|notes| {
        notes.map_or(Ok(None), |notes| Notes::decode(&notes, boot, &options.host, hosts.digest()))
    });
    let notes = match notes {
        Err(error) if error.kind() == Kind::Corrupt => {
            log::error("notes_damaged", &error);
            None
        }
        other => other?,
    };
    for header in store.inventory() {
        if matches!(header.state, State::Quarantined(_)) {
            // Other hosts have copies of it; its room is needed for the next.
            store.discard_quarantined(header.slot)?;
        }
    }
    let copies: BTreeMap<_, _> = store.inventory().iter().filter_map(copy_in).collect();
    let record = store.record();
    let dead_after_ms = options.dead_after.as_millis() as u64;
    let settings = Settings {
        domains: hosts.domains.clone(),
        copies: options.copies as usize,
        dead_after_ms,
        gather_ms: dead_after_ms,
        stuck_ms: 10 * dead_after_ms,
        give_up_ms: options.give_up.as_millis() as u64,
        versions: record.versions_per_shard.saturating_sub(1).max(1) as usize,
        fruitless_limit: FRUITLESS_LIMIT,
    };
    let role = Role {
        id,
        hosts,
        boot,
        limits: memory::Limits {
            copies: record.slot_count as usize,
            versions_of_shard: record.versions_per_shard as usize,
        },
        settings,
        patience: Patience { least_ms: dead_after_ms, stagger_ms: dead_after_ms / 3 },
    };
    Ok(Driver::new(role, notes.map(|notes| notes.stage), incarnation()?, copies, controller_number))
}

/// Greater than every one that this host's agent had before; by the clock, since nothing else is remembered.
fn incarnation() -> Result<u64> {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).map_err(|_| {
        let message = "the clock of this host is before 1970, so that a start cannot be told from earlier \
                       ones; set it";
        Error::new(Kind::Unavailable, message)
    })?;
    Ok(since.as_nanos() as u64)
}

/// A number that no controller has had.
fn controller_number() -> u32 {
    let mut bytes = [0; 4];
    loop {
        let filled = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty());
        let number = u32::from_le_bytes(bytes);
        if filled == Ok(bytes.len()) && number != 0 {
            return number;
        }
    }
}

impl Shared {
    fn serve(self: &Arc<Self>, options: &Options, intake: Arc<Intake>, order: Order) -> Result<Server> {
        let told = Arc::clone(self);
        let deliver = Box::new(move |from: &Name, message: &[u8]| told.deliver(from, message));
        let admission = Arc::new(Door(Arc::clone(self)));
        let services = Services {
            control: ControlService::new(Arc::clone(intake.store()), deliver),
            bulk: BulkService::admitting(intake, order, admission),
            turned_away: |error| log::error("turned_away", error),
        };
        Server::start(options.address()?, self.ways.credentials.clone(), Limits::default(), services)
    }

    /// Begins to tell others, and the machines what time it is.
    fn run(self: &Arc<Self>, runtime: &Handle, mut hosts_file: HostsFile) {
        let open = |(place, agent): (&Arc<Place>, u16)| {
            let credentials = self.ways.credentials.clone();
            (agent != self.id.0).then(|| Outbox::open(Arc::clone(place), credentials, runtime))
        };
        let outboxes = self.places.iter().zip(0u16..).map(open).collect();
        // It is set here and nowhere else.
        drop(self.running.set(Running { runtime: runtime.clone(), outboxes }));
        let shared = Arc::clone(self);
        runtime.spawn(async move {
            let mut ticks = interval(TICK);
            ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
            for number in 0u32.. {
                ticks.tick().await;
                if number.is_multiple_of(HOSTS_EVERY) {
                    shared.look_for_hosts(&mut hosts_file);
                }
                shared.tick();
            }
        });
    }

    fn look_for_hosts(&self, file: &mut HostsFile) {
        let known = self.lock().driver.hosts().clone();
        match file.changed(&known) {
            Ok(None) => {}
            Ok(Some(hosts)) => {
                for (place, address) in self.places.iter().zip(&hosts.addresses) {
                    place.move_to(address);
                }
                log::line("hosts_read", &[]);
            }
            Err(error) => log::error("hosts_not_read", &error),
        }
    }

    fn tick(self: &Arc<Self>) {
        let now_ms = self.begin.elapsed().as_millis() as u64;
        let incoming = self.intake.progress();
        let key_of = |key: &slot::Key| Shard::parse(&key.shard).map(|shard| shard.key(key.version));
        let named: Vec<Key> = incoming.iter().filter_map(|(key, _)| key_of(key)).collect();
        let mut inner = self.lock();
        let coming: Vec<Key> = inner.driver.asked().filter(|key| named.contains(key)).collect();
        let effects = inner.driver.tick(now_ms, &coming);
        self.carry_out(&mut inner, effects);
        self.free_unneeded(&mut inner);
        let is_wanted = |key: &slot::Key| {
            key_of(key).is_some_and(|named| inner.driver.wants(named)) || self.guests.is_coming(key)
        };
        let unwanted: Vec<slot::Key> =
            incoming.into_iter().map(|(key, _)| key).filter(|key| !is_wanted(key)).collect();
        drop(inner);
        for key in unwanted {
            // One that is about to be sealed is refused then.
            drop(self.intake.cancel(&key));
        }
    }

    fn deliver(self: &Arc<Self>, from: &Name, message: &[u8]) -> Result<()> {
        let from = self.agent_of(from)?;
        let letter = Letter::decode(message, self.places.len())?;
        let mut inner = self.lock();
        let effects = inner.driver.deliver(from, letter);
        self.carry_out(&mut inner, effects);
        Ok(())
    }

    /// The agent of that name, if it is another one.
    fn agent_of(&self, name: &Name) -> Result<AgentId> {
        let place = self.places.iter().position(|place| place.name() == name);
        let agent = place.map(|place| AgentId(place as u16)).filter(|&agent| agent != self.id);
        agent.ok_or_else(|| {
            Error::new(Kind::InvalidInput, "who speaks is none of the other hosts of this run")
                .with("host", name.as_str())
        })
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        // A machine that has panicked is as after the input before; what it lacks is said to it again.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
