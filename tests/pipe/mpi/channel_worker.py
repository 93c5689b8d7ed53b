"""One rank of tests/pipe/mpi/test_channels.py: `channel_worker.py CHECK ...` reports each check in a line of JSON.

A check is `CHANNEL/SCENARIO/DEVICES`, or `CHANNEL/SCENARIO-VARIANT/DEVICES`: as between hosts; as MPI that takes device
memory. It uses so many devices of the process, which has as many as the largest one takes. A check that fails is
reported and the next one follows, on communicators of its own.
"""

import json
import os
import queue
import random
import signal
import sys
import threading
import time
import traceback
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

CHECKS = sys.argv[1:]
jax.config.update("jax_num_cpu_devices", max(int(check.split("/")[2]) for check in CHECKS))

from mpi4py import MPI  # noqa: E402

from axonn_jax.pipe.channels.base import ChannelClosed, Ports  # noqa: E402
from axonn_jax.pipe.channels.buffers import DeviceBuffers  # noqa: E402
from axonn_jax.pipe.channels.choice import open_channel  # noqa: E402
from axonn_jax.pipe.channels.wakeup import Wakeup  # noqa: E402
from axonn_jax.pipe.schedule.tasks import Message  # noqa: E402

WORLD = MPI.COMM_WORLD
RANK = WORLD.Get_rank()
PATIENCE_S = 60


def value_of(message, step, form):
    """The same bits on both ranks."""
    seed = zlib.crc32(f"{message} {step}".encode())
    host = np.random.default_rng(seed).standard_normal(form.shape, np.float32).astype(form.dtype)
    return host, jax.device_put(host, form.sharding)


class Inbox:
    def __init__(self, channel):
        self.arrived = queue.SimpleQueue()
        channel.start(lambda message, value: self.arrived.put((message, value)), self.arrived.put)

    def get(self):
        got = self.arrived.get(timeout=PATIENCE_S)
        if isinstance(got, BaseException):
            raise got
        return got


class LateBuffers(DeviceBuffers):
    """In memory that programs still use now and then."""

    def writable(self, buffer):
        return random.random() < 0.5 and super().writable(buffer)


class Scenarios:
    """What a check does: one channel, on a mesh of so many devices, as a variant has it."""

    def __init__(self, name, variant, devices):
        self.name, self.variant, self.devices = name, variant, devices
        self.channel, self.comm = None, WORLD.Dup()
        shape = (-1, 2 if devices > 1 else 1)
        self.mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:devices]).reshape(shape), ("z", "x"))
        self.forms = {
            0: self.form_of((4, 8, 16), jnp.float32, "z", None, "x"),
            1: self.form_of((8, 256), jnp.bfloat16, None, "x"),  # replicated over z
            2: self.form_of((512, 1024), jnp.float32, "z"),  # replicated over x
            3: self.form_of((2048, 1024), jnp.bfloat16, ("z", "x")),
        }

    def form_of(self, shape, dtype, *spec):
        sharding = jax.sharding.NamedSharding(self.mesh, jax.sharding.PartitionSpec(*spec))
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    def value_of(self, message, step):
        return value_of(message, step, self.forms[message.stage])

    def meet(self):
        """A barrier that a rank which has failed does not hold up for ever."""
        everyone, end = self.comm.Ibarrier(), time.monotonic() + PATIENCE_S
        while not everyone.Test():
            assert time.monotonic() < end, "the other ranks have not come here"
            time.sleep(1e-3)

    def opened(self):
        here = {stage: form for stage, form in self.forms.items() if stage % self.comm.Get_size() == RANK}
        channel = self.channel = open_channel(self.name, Ports(here, len(self.forms)), self.comm)
        mpi4jax = self.name == "mpi4jax"
        pairs = [threads.wakeups.values() for threads in channel._directions.values()] if mpi4jax else []
        ends = [wakeup for pair in pairs for wakeup in pair] or [channel._wakeup]
        for wakeup in ends:
            assert wakeup.notified
            if self.variant == "unnotified":
                wakeup.peers, wakeup.notified = {}, False
        if self.variant == "device":
            channel._buffers = LateBuffers(list(here.values()), list(self.mesh.devices.flat))
        return channel, Inbox(channel)

    def check(self, value, message, step):
        form = self.forms[message.stage]
        assert value.sharding == form.sharding
        assert value.dtype == form.dtype
        expected = value_of(message, step, form)[0]
        shards = value.addressable_shards
        assert len(shards) == self.devices
        for shard in shards:  # every replicated copy has to be there, and right
            assert np.asarray(shard.data).tobytes() == expected[shard.index].tobytes(), (message, shard)

    def traffic(self):
        """Random messages both ways at once, for several steps, with random delays and hints."""
        channel, inbox = self.opened()
        for step in range(2):
            chance = random.Random(step)  # one plan for all ranks
            counts = {(d, s): chance.randrange(1, 9) for d in ("forward", "backward") for s in self.forms}
            plan = [Message(d, s, m) for (d, s), count in counts.items() for m in range(count)]
            chance.shuffle(plan)
            mine = random.Random(f"{step} {RANK}")
            # Forward into stage s comes from s - 1, backward from s + 1: with two ranks always from the other one.
            outgoing = [message for message in plan if message.stage % 2 != RANK]
            incoming = {message for message in plan if message.stage % 2 == RANK}
            held = []
            while outgoing or incoming:
                channel.busy(mine.random() < 0.5)
                if outgoing and (mine.random() < 0.6 or not incoming):
                    message = outgoing.pop()
                    channel.send(message, self.value_of(message, step)[1])
                elif not inbox.arrived.empty() or not outgoing:
                    message, value = inbox.get()
                    incoming.remove(message)
                    held.append((message, value))
                if mine.random() < 0.2:
                    time.sleep(mine.random() * 0.01)
            channel.flush(PATIENCE_S)
            assert channel.unsent() == []
            for message, value in held:  # late, so that a reused receive buffer would show
                self.check(value, message, step)
        assert channel.close()
        assert channel.close()

    def burst(self):
        """Everything of a step is sent, both ways and around the ring of ranks, before anything is looked at."""
        ranks = self.comm.Get_size()
        stages = 2 * ranks
        self.forms = {stage: self.form_of((512, 1024), jnp.float32, "z", "x") for stage in range(stages)}  # 2 MB
        channel, inbox = self.opened()
        self.meet()
        incoming = set()
        for microbatch in range(4):
            for stage in range(stages):
                for direction, source in (("forward", stage - 1), ("backward", stage + 1)):
                    message = Message(direction, stage, microbatch)
                    if 0 <= source < stages and source % ranks == RANK:
                        channel.send(message, self.value_of(message, 0)[1])
                    if 0 <= source < stages and stage % ranks == RANK:
                        incoming.add(message)
        got = dict(inbox.get() for _ in incoming)
        assert set(got) == incoming
        for message, value in got.items():
            self.check(value, message, 0)
        channel.flush(PATIENCE_S)
        self.meet()
        assert channel.close()

    def unready(self):
        """A value still in computation neither holds up its sender nor what comes after it."""
        channel, inbox = self.opened()
        form = self.forms[0]
        slow = jax.jit(lambda x, w: jax.lax.fori_loop(0, 60, lambda i, w: w @ w / 700, w)[0, 0] * 0 + x)
        weights = jnp.ones((700, 700))
        _, one = self.value_of(Message("forward", 0, 0), 0)
        jax.block_until_ready(slow(one, weights))
        for direction in ("forward", "backward"):  # whatever is compiled at a first message is compiled now
            first = Message(direction, 1 - RANK, 0)
            channel.send(first, self.value_of(first, 0)[1])
            inbox.get()
        self.meet()
        if RANK == 1:
            value = jax.device_put(slow(one, weights), form.sharding)
            channel.send(Message("forward", 0, 0), value)
            assert not value.is_ready()  # send has not waited for it
            other = Message("backward", 0, 1)
            channel.send(other, self.value_of(other, 0)[1])
        else:
            messages = [inbox.get() for _ in range(2)]
            assert [message.direction for message, _ in messages] == ["backward", "forward"]
            self.check(messages[0][1], messages[0][0], 0)
        channel.flush(PATIENCE_S)
        assert channel.close()

    def withheld(self):
        """A middle rank's message that its receiver does not take holds up nothing for its other neighbour."""
        here = {RANK: self.form_of((512, 1024), jnp.float32)}  # 2 MB
        self.forms = dict.fromkeys(range(3), here[RANK])
        channel = self.channel = open_channel(self.name, Ports(here, 3), self.comm)
        arrived, taken = queue.SimpleQueue(), threading.Event()
        if RANK != 2:
            taken.set()

        def deliver(message, value):
            arrived.put((message, value))
            assert taken.wait(PATIENCE_S)  # as a thread that gets no turn beside a long program

        channel.start(deliver, arrived.put)
        if RANK == 1:
            for microbatch in range(2):
                message = Message("forward", 2, microbatch)
                channel.send(message, self.value_of(message, 0)[1])
            self.comm.recv(source=2)
            message = Message("backward", 0, 0)
            channel.send(message, self.value_of(message, 0)[1])
        for microbatch in {0: [0], 1: [], 2: [0, 1]}[RANK]:
            message, value = arrived.get(timeout=PATIENCE_S / 4)
            assert message == Message("backward" if RANK == 0 else "forward", RANK, microbatch)
            self.check(value, message, 0)
            if RANK == 0:
                self.comm.send(None, 2)
            elif microbatch == 0:  # the thread that receives is not free now
                time.sleep(0.1)  # the second message's header is there by then
                self.comm.send(None, 1)
                self.comm.recv(source=0)
                taken.set()
        channel.flush(PATIENCE_S)
        self.meet()
        assert channel.close()

    def awake(self):
        """An array that is ready leaves from `send`, without waking a thread up."""
        channel, inbox = self.opened()
        woken, wake = [], channel._wakeup.wake
        channel._wakeup.wake = lambda: woken.append(channel) or wake()
        for step in range(8):  # the thread may be polling at one time, but not each time
            message = Message("forward", 1 - RANK, 0)
            channel.send(message, self.value_of(message, step)[1].block_until_ready())
            self.check(inbox.get()[1], Message("forward", RANK, 0), step)
            time.sleep(5e-3)
        assert len(woken) < 8
        channel.flush(PATIENCE_S)
        assert channel.close()

    def steps(self):
        """Messages of the same name keep their order when the receiver is steps behind."""
        channel, inbox = self.opened()
        message = Message("forward", 1 - RANK, 0)
        for step in range(12):
            channel.send(message, self.value_of(message, step)[1])
        for step in range(12):
            got, value = inbox.get()
            self.check(value, got, step)
        channel.flush(PATIENCE_S)
        assert channel.close()

    def mismatch(self):
        """A message of the wrong size reaches `failed`, and the channel says so from then on."""
        channel, inbox = self.opened()
        if RANK == 0:
            wrong = self.form_of((2, 2), jnp.float32)
            message = Message("forward", 1, 0)
            channel.send(message, value_of(message, 0, wrong)[1])
            channel.flush(PATIENCE_S)
        else:
            error = inbox.arrived.get(timeout=PATIENCE_S)
            assert isinstance(error, ValueError), error
            assert "forward message for stage 1, microbatch 0" in str(error)
            with pytest.raises(ChannelClosed) as refused:
                channel.send(Message("forward", 0, 0), self.value_of(Message("forward", 0, 0), 0)[1])
            assert refused.value.__cause__ is error
        self.meet()
        channel.close()

    def dead(self, kind):
        """The peer is gone while a large message is on its way to it: flush and close end in time and say so."""
        channel, inbox = self.opened()
        message = Message("forward", 1, 0)
        if RANK == 1:  # a first message passes, so that both ends are known to run
            inbox.get()
            self.comm.send(os.getpid(), 0)
            os.kill(os.getpid(), kind)
            time.sleep(PATIENCE_S)
        channel.send(message, self.value_of(message, 0)[1])
        peer = self.comm.recv(source=1)
        time.sleep(0.3)
        big = Message("forward", 3, 0)  # 4 MB
        channel.send(big, self.value_of(big, 0)[1])
        began = time.monotonic()
        try:
            channel.flush(1.0)
        except TimeoutError as error:
            told = str(error)
        flushed = time.monotonic() - began
        clean = channel.close(1.0)
        closed = time.monotonic() - began - flushed
        if kind == signal.SIGSTOP:
            os.kill(peer, signal.SIGKILL)
        return {"told": told, "flush_s": flushed, "close_s": closed, "clean": clean}

    def killed(self):
        return self.dead(signal.SIGKILL)

    def stopped(self):
        return self.dead(signal.SIGSTOP)

    def unclosed(self):
        """The interpreter ends without close(): nothing hangs, nothing crashes."""
        channel, inbox = self.opened()
        channel.send(Message("forward", 1 - RANK, 0), self.value_of(Message("forward", 1 - RANK, 0), 0)[1])
        self.check(inbox.get()[1], Message("forward", RANK, 0), 0)
        channel.flush(PATIENCE_S)

    def looks(self):
        """How often a second a waiting channel looks for messages, idle and beside a computation."""
        channel, _ = self.opened()
        rates, seconds, threads = {}, Wakeup.seconds, {"mpi4py": 1, "mpi4jax": 2}[self.name]
        for name, active in (("idle", False), ("busy", True)):
            channel.busy(active)
            time.sleep(0.5)  # after something has happened it looks more often for a while
            asked, began = [], time.monotonic()
            Wakeup.seconds = lambda self, asked=asked, **how: asked.append(self) or seconds(self, **how)
            time.sleep(1)
            rates[name] = len(asked) / (time.monotonic() - began) / threads
        Wakeup.seconds = seconds
        self.meet()
        channel.close()
        return rates


def reported(check):
    """Runs a check; what it found, or the traceback of how it failed."""
    name, what, devices = check.split("/")
    scenario, _, variant = what.partition("-")
    scenarios = Scenarios(name, variant, int(devices))
    try:
        return {"found": getattr(scenarios, scenario)()}
    except Exception:
        if scenarios.channel is not None:
            scenarios.channel.close(1.0)
        return {"error": traceback.format_exc()}


for check in CHECKS:
    report = reported(check)
    print(json.dumps({"check": check, "rank": RANK, **report}), flush=True)
    if "clean" in (report.get("found") or {}):  # without its peer it cannot end in order
        os._exit(0)
