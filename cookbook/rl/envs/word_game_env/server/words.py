"""The secret words, by length. The order is part of the game: a seed always picks the same word."""

from __future__ import annotations

__all__ = ["SECRETS"]

_FOUR = """
bark bell bird boat bone cake calm card clay coal coin cold corn crab dawn deer desk dove
drum dust fern film fire fish flag foam fork frog gate gift goat gold hail harp hawk hill
horn iron jade kite lake lamp leaf lime lion loaf moon moss nest oath palm pear pine pond
rain reef ring road rock roof rope rose sail salt sand seed silk snow soap song star stem
"""
_FIVE = """
acorn amber apple badge beach berry birch blade brick bread brush cabin camel candy cedar
chair charm cliff cloud clove coast comet coral crane crown daisy delta diver eagle earth
ember fable ferry flame flute frost glove grape grass honey horse ivory jelly knife lemon
lilac linen lunar maple melon metal mouse night ocean olive onion otter pearl petal piano
plaza pouch quilt raven river robin salad scarf shell smoke spoon stone storm table tiger
"""
_SIX = """
anchor autumn bamboo basket beacon bottle branch breeze bridge butter candle canvas
carpet castle cheese cherry circle copper cotton desert dragon falcon fabric flower
forest galaxy garden ginger hammer harbor island jacket jungle ladder lagoon lizard magnet
marble meadow mirror monkey needle nickel orange orchid oyster parrot pebble pencil pepper
pillow planet pocket puzzle rabbit ribbon rocket saddle salmon silver spider spring summer
temple tunnel turtle valley velvet violet walnut window winter yellow
"""

SECRETS: dict[int, tuple[str, ...]] = {
    4: tuple(_FOUR.split()),
    5: tuple(_FIVE.split()),
    6: tuple(_SIX.split()),
}
