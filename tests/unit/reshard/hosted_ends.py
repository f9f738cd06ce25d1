"""A trainer and a sampler of one tensor, for a runtime to host."""

import torch

from tranship.layouts import Layout, Piece, full_box
from tranship.reshard import Announcement, WeightSink, WeightSource, make_plan

SHAPE = (1000, 256)


def plan():
    source = Piece("w", SHAPE, full_box(SHAPE), "w", full_box(SHAPE), "float32")
    target = Piece("w", SHAPE, full_box(SHAPE), "w", full_box(SHAPE), "bfloat16")
    return make_plan(Layout(((source,),)), Layout(((target,),)), bucket_bytes=200 << 10)


class Trainer:
    def __init__(self, context):
        self.objects = context.objects
        self.weight = torch.randn(SHAPE)
        self.source = WeightSource(plan(), {"w": self.weight}.__getitem__)

    def poll(self):
        return False

    def train(self):
        self.weight += torch.randn(SHAPE)

    def total(self):
        return self.weight.to(torch.bfloat16).double().sum().item()

    def publish(self, version):
        return self.source.publish(version, self.objects.put)

    def damage(self, announcement):
        flipped = self.objects.get(announcement.refs[1], 20).copy()
        flipped[5] ^= 4
        refs = {**announcement.refs, 1: self.objects.put(flipped)}
        return Announcement(announcement.version, announcement.manifest, refs)


class Sampler:
    def __init__(self, context):
        self.objects = context.objects
        self.weight = torch.zeros(SHAPE, dtype=torch.bfloat16)
        self.sink = WeightSink(plan(), {"w": self.weight}.__getitem__)

    def poll(self):
        return False

    def pull(self, announcement):
        return self.sink.pull([announcement], lambda ref: self.objects.get(ref, 20))

    def total(self):
        return self.weight.double().sum().item()
