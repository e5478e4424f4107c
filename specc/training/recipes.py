"""Prompts put together from parts, as people write them: a situation, details, a question, a text to work on.

A target's own user turns are short and all of one kind, and a drafter trained on answers to those alone is worse where people ask.
Nothing here is taken from anywhere: the parts are everyday matters, and a prompt is a random walk through them.
"""

from __future__ import annotations

import random
import re

_SLOT = re.compile(r"\{(\w+)\}")

# A part is a list of texts; ``{name}`` in one stands for a text of the part ``name``, and ``{n2}`` for a number of two digits.
PARTS: dict[str, tuple[str, ...]] = {
    # --- what people ask ---------------------------------------------------------------------------------
    "chat": (
        "Why is it that {fact}?", "Why is it that {fact}? {style}", "Can you explain why {fact}? {style}", "I have always wondered why {fact}. {extra}",
        "{person} says that {claim}. Is that true? {style}", "Is it true that {claim}?",
        "How does {machine} work? {style}", "Explain to me how {machine} works. {extra}", "What exactly is {concept}? {style}",
        "What is the difference between {pair}? {extra}", "Compare {pair}. {style}", "{pair}: which of the two would you choose, and why?",
        "I would like to learn {skill}. {means} {ask}", "At {age} I have decided to learn {skill}. {means} {ask}",
        "{trouble} {detail} {ask}", "{trouble} {detail} {detail} {ask}", "{person} and I disagree. {trouble} {ask}",
        "{detail} {trouble} What would you do in my place?", "I am planning {event}. {limit} {ask}",
        "Plan {event} for {few} people. {limit}", "Help me to prepare {event}. {limit} {detail}",
        "Write {form} to {recipient} about {matter}. {tone}", "Write {form} to {recipient}: {matter}. {tone} {limit}",
        "Write a short story about {hero} who {deed}.", "Tell me a story in which {hero} {deed}. {tone}",
        "Write a dialogue between {hero} and {hero}. {tone}", "Write a poem of {few} lines about {topic}.",
        "What should a beginner know about {topic}?", "Tell me something surprising about {topic}.", "Give me {few} good questions to ask about {topic}.",
        "What would happen if {supposed}?", "Imagine that {supposed}. How would everyday life change?",
        "{person} wants to buy {thing}. {limit} What should one look at?", "How do I repair {thing}? {detail}", "How do I clean {thing} without damaging it?",
        "What can I cook with {food}, {food} and {food}? {limit}", "How long can I keep {food}, and how do I notice that it has gone off?",
    ),
    "style": (
        "Please explain it simply.", "Explain it so that a child understands it.", "Keep it short.", "Answer in {few} sentences.", "Give an example.",
        "Use a comparison from everyday life.", "I know nothing about physics.", "Give me the details, too.", "Answer step by step.",
        "Please be honest about what is not known.", "I need it for a talk at school.", "",
    ),
    "extra": (
        "And since when has one known that?", "Who found that out?", "Does it hold everywhere?", "What are the exceptions?", "How could I try it at home?",
        "Is there something that I can do about it?", "Please mention the most common mistake.", "Which of it matters in practice?", "",
    ),
    "ask": (
        "What would you advise?", "Where should I start?", "What should I do first?", "How do I go about it?", "Can you suggest a plan for the first month?",
        "What are the most common mistakes?", "What would you say to them?", "How can I find out what is behind it?", "Is it worth the effort?",
        "What do I have to look out for?", "Please give me {few} concrete tips.", "How would you decide?", "What else could I try?",
    ),
    "fact": (
        "sea water is salty", "cats purr", "bread dough rises", "metal feels colder than wood", "people yawn", "onions make you cry", "the moon has phases",
        "glass is transparent", "ships of steel float", "bees dance", "there are leap years", "stars twinkle", "snow is white", "rubber stretches",
        "some people are left-handed", "hot air rises", "aeroplanes leave white trails", "our fingers get wrinkled in the bath", "dogs wag their tails",
        "old books smell", "tides come twice a day", "popcorn bursts", "mirrors swap left and right", "milk boils over", "batteries run down",
        "thunder comes after the lightning", "the days are longer in summer", "a compass points north", "we dream", "birds fly in a V", "ice is slippery",
        "a wet cloth looks darker", "mosquito bites itch", "the sunset is red", "soap makes things clean", "bicycles do not fall over when they roll",
        "prices end in ninety-nine", "some languages have no articles", "keyboards are not in alphabetical order", "we have two ears",
        "apples turn brown after they are cut", "a clock runs clockwise", "coins are round", "paper turns yellow", "whales come up for air",
    ),
    "claim": (
        "goldfish forget everything after a few seconds", "one must not wake a sleepwalker", "lightning never strikes the same place twice", "carrots are good for the eyes",
        "shaving makes hair grow faster", "we use only a tenth of our brain", "bulls hate the colour red", "reading in poor light ruins the eyes",
        "one should drink two litres of water a day", "hot water freezes faster than cold water", "the Great Wall can be seen from space", "bats are blind",
        "cold weather gives you a cold", "spinach is full of iron", "a penny from a tower can kill", "sugar makes children wild", "plants grow better with music",
        "one can learn a language while asleep", "handwriting shows the character", "tea keeps one awake longer than cola",
    ),
    "machine": (
        "a refrigerator", "a bicycle gear", "a microwave oven", "a lock on a canal", "a solar panel", "a pressure cooker", "a lighthouse", "a zip", "a touchscreen",
        "a vaccine", "a bank loan", "an election with two rounds", "a search engine", "a washing machine", "the post office", "a thermos flask", "a piano", "a hearing aid",
        "a barcode scanner", "an anchor", "a wind turbine", "a smoke alarm", "an escalator", "a ballpoint pen", "a water tower", "a mortgage", "noise cancelling",
    ),
    "concept": (
        "a black hole", "a budget", "an algorithm", "democracy", "a calorie", "a virus", "compound interest", "a metaphor", "the ozone layer", "an ecosystem",
        "a passive sentence", "gravity", "a strike", "the equator", "a blockchain", "an allergy", "a fossil", "a patent", "sustainability", "a quorum", "friction",
        "a sonnet", "the placebo effect", "a tariff", "an operating system", "peer review", "a watershed", "muscle memory", "a bibliography",
    ),
    "pair": (
        "a crocodile and an alligator", "weather and climate", "a virus and a bacterium", "baking powder and yeast", "a debit card and a credit card", "a lake and a pond",
        "jam and jelly", "a comet and an asteroid", "cotton and wool", "a moth and a butterfly", "a university and a college", "a leasing contract and a loan",
        "butter and margarine", "running and walking", "a town and a village", "gas and electric cookers", "a novel and a short story", "a laptop and a tablet",
        "empathy and sympathy", "a violin and a viola", "trains and coaches", "mass and weight", "a rabbit and a hare", "concrete and cement", "a frog and a toad",
        "working at home and in the office", "a gas heater and a heat pump", "fog and mist", "latitude and longitude", "tap water and bottled water",
    ),
    "skill": (
        "to play the guitar", "Italian", "to cook properly", "chess", "to draw portraits", "to sew", "to ride a horse", "sign language", "to type with ten fingers",
        "to program", "to juggle", "to dance the tango", "to repair bicycles", "to take good photographs", "calligraphy", "to bake bread", "to speak in public",
        "Japanese", "to sing", "to sail", "to knit", "to read music", "first aid", "to ski", "to grow vegetables", "mental arithmetic", "to play the drums",
    ),
    "age": ("seventeen", "twenty-six", "thirty-one", "thirty-eight", "forty-four", "fifty-two", "sixty-five", "seventy-three"),
    "means": (
        "I have half an hour in the evening.", "I can spend {n2} euros a month on it.", "I tried it once as a child and gave up.", "There is no school near my village.",
        "I learn best with other people.", "I do not like books.", "I only have the weekends.", "I have no equipment yet.", "My hands are not the quickest any more.",
        "I would like to manage it by next summer.", "", "",
    ),
    "person": (
        "My brother", "My grandmother", "A colleague", "My neighbour", "My daughter", "My boss", "An old friend", "My teacher", "My uncle", "The man at the market", "My flatmate",
        "My father-in-law", "A customer", "My cousin", "My best friend", "Our landlord",
    ),
    "trouble": (
        "{person} borrowed my {tool} in spring and has not brought it back.", "{person} is always late when we meet.", "I have been offered a job in another town.",
        "My dog barks as soon as I leave the house.", "The neighbours above us walk about in heavy shoes at night.", "I cannot concentrate at my desk for more than ten minutes.",
        "{person} has asked me for {n2}0 euros and I do not want to lend them.", "My tomatoes get brown spots every summer.", "Our team talks for an hour each morning and nothing gets decided.",
        "My son wants to stop playing the piano.", "I forgot the birthday of {person}.", "My bread never gets a crust.", "I have an exam in three weeks and have not begun.",
        "I am the only one in our flat who takes out the rubbish.", "{person} wants to paint the hall green and I do not.", "My internet is slow, but only in the evening.",
        "I spend three hours a day on my phone.", "My back hurts after a day at the computer.", "Our club has hardly any young members.", "My bicycle makes a clicking noise.",
        "I moved to a new town and know nobody.", "There are moths in my kitchen.", "I have to give a speech at the wedding of {person}.", "I always buy more food than I can eat.",
        "My savings lie in an account without interest.", "{person} does not answer my messages any more.", "I talk too fast when I am nervous.", "The windows of my bedroom are wet each morning.",
        "I have written {n2} applications and got no invitation.", "My cat scratches the sofa.", "My daughter is afraid of the dark.", "I would like to leave my job, but I do not know what comes after.",
    ),
    "tool": ("drill", "ladder", "tent", "camera", "cookery book", "suitcase", "trailer", "sewing machine", "tool box"),
    "detail": (
        "It has been like that for two months.", "We have talked about it once, without success.", "I do not want to hurt anybody.", "It costs me a lot of sleep.", "Last week it got worse.",
        "I have read about it, but every page says something else.", "I live alone.", "We are a family of five.", "I work shifts.", "There is not much money.", "I have asked two people and got three answers.",
        "I am not very patient.", "My flat has only two rooms.", "It is not the first time.", "I have until the end of the month.", "Perhaps it is my own fault.", "In winter it is worse than in summer.",
        "The warranty ended in March.", "I only notice it at the weekend.", "Everybody else seems to manage.", "I paid {n3} euros for it.", "My parents must not know of it yet.",
    ),
    "event": (
        "a birthday party", "a weekend in the mountains", "a move to another flat", "a school trip", "a street festival", "a picnic", "a dinner with the new neighbours", "a farewell party at work",
        "a week without a car", "a bicycle tour of {few} days", "a family meeting", "a flea market", "a quiz evening", "a visit to a museum with children", "a vegetable garden", "a surprise for {person}",
        "a small wedding", "a reading group", "a day at the lake", "a jumble sale", "the first day of a new trainee",
    ),
    "limit": (
        "It must not cost more than {n3} euros.", "Two of us are vegetarians.", "Nobody has a car.", "It may rain.", "There is a toddler with us.", "We only have one afternoon.", "One guest is in a wheelchair.",
        "I have never done that before.", "It should be quiet.", "Use at most {few} sentences.", "I only have a small kitchen.", "It has to be finished on Friday.", "", "",
    ),
    "form": ("an email", "a short letter", "a polite message", "a complaint", "an invitation", "a note", "a reminder", "a letter of thanks", "an apology", "a notice for the hall"),
    "recipient": (
        "my landlord", "a customer", "my teacher", "the parents of my class", "an old friend", "the town council", "my colleagues", "a hotel", "my insurance company", "the members of our choir",
        "a supplier", "my neighbours", "the editor of a newspaper", "my aunt", "a job applicant", "the caretaker",
    ),
    "matter": (
        "the heating, which has been broken since Monday", "a delivery that arrived damaged", "the meeting that has to be moved to Thursday", "a lost key", "the noise of the building site",
        "a bill that was paid twice", "the summer party", "a refund for a cancelled course", "the new opening hours", "a parcel that was left at my door by mistake", "the bicycles in the hall",
        "the trip in May", "a recommendation for my application", "a missing page in a contract", "a change of address", "the rehearsal that is cancelled", "a reservation for {few} people",
        "the date of an inspection", "a dog that was found", "an invoice that is still open",
    ),
    "tone": ("Be friendly.", "Stay polite, but firm.", "Keep it under {n2}0 words.", "It may be funny.", "Do not sound angry.", "Use simple words.", "It should sound personal.", ""),
    "hero": (
        "a retired clockmaker", "a fox", "a girl with a wooden leg", "two sisters", "a lighthouse keeper", "a robot gardener", "a tired king", "a bus driver", "a snowman", "the last librarian",
        "a ghost", "a young sailor", "an old map", "a baker", "a detective without a case", "a crow", "a schoolboy", "a scientist", "a painter", "a dragon",
    ),
    "deed": (
        "finds a letter that was never sent", "cannot tell lies", "has to cross a desert", "wakes up a day early", "loses something small and important", "learns to be alone", "keeps a secret too long",
        "opens a shop for dreams", "saves a village by accident", "meets an old enemy", "builds a boat in the attic", "makes a promise", "forgets a name", "hears music at night", "wins a prize by mistake",
    ),
    "topic": (
        "volcanoes", "owls", "cheese", "the Vikings", "coral reefs", "the alphabet", "bridges", "the Silk Road", "mushrooms", "tea", "clouds", "jazz", "the Moon", "deserts", "maps", "honey",
        "earthquakes", "the circus", "penguins", "rivers", "glass", "the Olympic Games", "wolves", "railways", "autumn", "football", "salt", "the theatre", "spiders", "winter", "photography", "rice",
    ),
    "supposed": (
        "there were no money", "everybody spoke one language", "the sun did not rise for a week", "people could fly", "nobody had to sleep", "animals could talk", "the internet failed for a month",
        "the Earth turned twice as fast", "there were no borders", "every child learnt to cook at school", "cars were forbidden in towns", "we lived for two hundred years", "all bees died",
    ),
    "thing": (
        "a used car", "a washing machine", "a mattress", "a leather jacket", "a tent", "a coffee machine", "a violin", "a winter coat", "a wooden table", "a laptop", "a pair of hiking boots", "a carpet",
        "a pan of cast iron", "a telescope", "a garden hose", "an electric bicycle", "a raincoat", "a kettle", "a wristwatch", "a wooden floor",
    ),
    "food": (
        "rice", "eggs", "carrots", "lentils", "mushrooms", "cream", "apples", "spinach", "bread from yesterday", "potatoes", "chickpeas", "cheese", "noodles", "tomatoes", "pumpkin", "smoked fish",
        "onions", "oats", "beans", "yoghurt", "cabbage", "minced meat", "lemons",
    ),
    "few": ("three", "four", "five", "six", "seven", "eight", "ten", "twelve"),
    # --- lists -------------------------------------------------------------------------------------------
    "list": (
        "List {few} {kind}.", "Name {few} {kind} and say in one sentence why.", "Give me {few} {kind}, the most important first.", "Make a checklist for {event}. {limit}",
        "What do I need for {event}? Write a list.", "List the steps to {job}.", "What are the steps to {job}? Number them.", "Which {kind} do you know? {limit}",
        "Make a table of {few} {kind} with two columns.", "Give me {few} ideas for {event}. {limit}", "List the advantages and disadvantages of {topic} as a hobby.",
        "Name the {few} most important things about {topic}.", "Write a shopping list for {few} days. {limit}", "What are the parts of {machine}? List them.", "List {few} arguments for and {few} against {idea}.",
    ),
    "kind": (
        "animals that live at night", "rivers in Europe", "ways to save electricity", "games that need no equipment", "words that rhyme with light", "vegetables that grow in the shade", "inventions of the last century",
        "jobs in a hospital", "questions for a job interview", "reasons to walk to work", "instruments of an orchestra", "names for a cat", "cheap dinners", "habits of good listeners", "planets and their moons",
        "spices", "indoor plants", "board games", "trees with edible fruits", "things to pack for a hike", "exercises for the back", "countries without a coast", "tools for wood", "kinds of bread", "topics for an essay",
        "activities for a rainy day", "books for young readers", "signs of stress", "capital cities", "rules for a shared flat",
    ),
    "job": (
        "change a bicycle tyre", "write an application", "plant a tree", "make pancakes", "open a bank account", "clean an oven", "prepare a talk", "wash a woollen jumper", "move house", "build a bird house", "make tea properly",
        "register a club", "paint a wall", "return a parcel", "descale a kettle", "find a flat", "back up a computer", "set a table for guests", "sharpen a knife", "resolve an argument",
    ),
    "idea": (
        "school uniforms", "a speed limit of 30", "working four days a week", "pets in a flat", "homework", "self-driving buses", "paying with cash", "longer opening hours", "reading news in the morning", "a year abroad",
        "free museums", "mobile phones at school", "living in the countryside", "keeping a diary", "learning Latin",
    ),
    # --- numbers -----------------------------------------------------------------------------------------
    "maths": (
        "A {shop} sells {goods} for {n1} euros each. {name} buys {n1} of them and pays with a {n1}00 euro note. How much change does {name} get?",
        "{name} has {n2} {goods} and gives {n1} to each of {few} friends. How many are left?", "A train travels {n3} kilometres in {n1} hours. What is its average speed?",
        "What is {n2} times {n2}? Show the steps.", "Calculate {n3} + {n3} - {n2}.", "What is {n2} percent of {n3}?", "Solve for x: {n1}x + {n2} = {n3}.", "Solve the equation {n1}(x - {n1}) = {n2}.",
        "A rectangle is {n2} cm long and {n1} cm wide. What are its area and its perimeter?", "{name} reads {n2} pages a day. How many days does a book of {n3} pages take?",
        "A recipe for {few} people needs {n3} grams of flour. How much is needed for {n2} people?", "A {shop} lowers the price of {goods} from {n2} euros by {n2} percent. What is the new price?",
        "In a class of {n2} children, {n1} play chess and {n1} play football. How many do neither, if nobody does both?", "The sum of two numbers is {n2} and their difference is {n1}. Which are they?",
        "{name} saves {n2} euros a month. After how many months are there {n3} euros?", "A tank holds {n3} litres and loses {n1} litres an hour. When is it half empty?", "What is the average of {n2}, {n2}, {n2} and {n2}?",
        "How many minutes are {n1} hours and {n2} minutes?", "Write {n3} as a product of primes.", "A circle has a radius of {n1} cm. What is its area?", "{name} is {n1} years older than {name}. Together they are {n2}. How old are they?",
        "Two cyclists start {n3} km apart and ride towards each other at {n2} and {n2} km/h. When do they meet?", "What is {n1}/{n1} + {n1}/{n1}?", "A box holds {n2} {goods}. How many boxes are needed for {n3}?",
        "If {n1} workers need {n2} days, how long do {n1} workers need?", "Round {n3}.{n2} to the nearest ten and explain the rule.", "How many ways are there to seat {few} people in a row?",
    ),
    "shop": ("shop", "market stall", "bakery", "bookshop", "farm", "florist", "kiosk", "hardware shop"),
    "goods": ("pencils", "apples", "candles", "tickets", "eggs", "notebooks", "roses", "marbles", "stamps", "bottles", "oranges", "cups", "stickers", "cakes"),
    "name": ("Anna", "Ben", "Carla", "David", "Emma", "Farid", "Grace", "Hugo", "Ines", "Jonas", "Kim", "Lena", "Mo", "Nina", "Omar", "Paula", "Rosa", "Sam"),
    # --- code --------------------------------------------------------------------------------------------
    "code": (
        "Write a Python function {stub}. It should {task}.", "Write a Python function that {does}. {wish}", "Write a function in Python that {does} and show how to call it.",
        "Complete this Python function.\n\n```python\ndef {stub}:\n    \"\"\"{Task}.\"\"\"\n```", "Complete the function below. Return the whole function.\n\n```python\ndef {stub}:\n    \"\"\"\n    {Task}.\n    {note}\n    \"\"\"\n```",
        "Here is the beginning of a function:\n\n```python\nfrom typing import List\n\n\ndef {stub}:\n    \"\"\" {Task}.\n    \"\"\"\n```\n\nFinish it.", "Write a Python class {noun} with {members}. {wish}",
        "Write a class for {thing_code} in Python. {wish}", "Explain {feature} in Python with a short example.", "When should I use {feature} in Python? Show an example.", "Write a test for a function that {does}.",
        "Write a Python script that {script}. {wish}", "How do I {howto} in Python?", "Write an SQL query that {query}.", "Write a bash command that {shell}.", "Write a JavaScript function that {does}.",
        "What is the output of this program, and why?\n\n```python\n{program}\n```", "Find the bug in this code and correct it:\n\n```python\n{broken}\n```", "Explain what this function does, line by line:\n\n```python\n{program}\n```",
        "Rewrite this in a cleaner way:\n\n```python\n{broken}\n```",
    ),
    "stub": (
        "count_words(text: str) -> dict", "second_largest(numbers: list) -> int", "is_prime(n: int) -> bool", "merge(left: list, right: list) -> list", "reverse_words(sentence: str) -> str", "gcd(a: int, b: int) -> int",
        "flatten(items: list) -> list", "rotate(items: list, k: int) -> list", "to_roman(number: int) -> str", "longest_run(values: list) -> int", "parse_date(text: str) -> tuple", "median(values: list) -> float",
        "chunks(items: list, size: int) -> list", "is_anagram(a: str, b: str) -> bool", "transpose(matrix: list) -> list", "running_total(values: list) -> list", "vowels(text: str) -> int", "collatz(n: int) -> list",
        "remove_duplicates(items: list) -> list", "caesar(text: str, shift: int) -> str", "binary_search(items: list, target: int) -> int", "digits(n: int) -> int", "common(a: list, b: list) -> list", "capitalize_all(names: list) -> list",
        "group_by_length(words: list) -> dict", "interleave(a: list, b: list) -> list", "distance(p: tuple, q: tuple) -> float", "compress(text: str) -> str", "fizzbuzz(n: int) -> list", "invert(mapping: dict) -> dict",
    ),
    "task": (
        "return the result for every element in order", "return the number of elements that are larger than the one before", "ignore upper and lower case", "return an empty result for an empty input", "raise a ValueError for a negative number",
        "work for lists of any length", "return the elements sorted from high to low", "count how often each element occurs", "return the first element that occurs twice, or None", "return True if the text reads the same backwards",
        "return the sum of the squares of the even numbers", "return the pairs whose sum is zero", "return the index of the smallest value", "return the longest common prefix", "not change its argument", "return the words that begin with a capital letter",
    ),
    "Task": (
        "Return the result for every element in order", "Return the number of elements that are larger than the one before", "Count how often each element occurs", "Return the first element that occurs twice, or None",
        "Return True if the text reads the same backwards", "Return the sum of the squares of the even numbers", "Return all pairs whose sum is zero", "Return the index of the smallest value", "Return the longest common prefix",
        "Return the elements that both have, without duplicates", "Return the text with every second letter in upper case", "Return the numbers that are divisible by three", "Return the values from high to low", "Return how many steps are needed",
    ),
    "note": ("An empty input gives an empty result.", "The argument is not changed.", "Negative numbers are not allowed.", "Equal elements keep their order.", "Upper and lower case are the same.", "Only the standard library is used."),
    "does": (
        "checks whether a number is a perfect square", "returns the n-th Fibonacci number", "removes all punctuation from a text", "converts Celsius to Fahrenheit", "finds the most common word in a text", "checks whether brackets are balanced",
        "sorts a list of dictionaries by a key", "returns all divisors of a number", "counts the lines of a file", "splits a list into two halves", "checks a password for length and digits", "returns the factorial of a number",
        "turns a number of seconds into hours, minutes and seconds", "finds the two numbers in a list that add up to a target", "returns the power set of a list", "computes the dot product of two vectors", "replaces tabs by spaces",
        "checks whether a year is a leap year", "returns the binary form of a number", "finds the shortest path in a grid", "merges two dictionaries", "returns the moving average of a list", "validates an email address", "counts islands in a matrix",
    ),
    "wish": ("Add type hints.", "Add a docstring.", "Handle errors.", "Explain the code afterwards.", "Use no libraries.", "Keep it as short as possible.", "Add three examples.", "Write comments.", ""),
    "noun": ("Queue", "Account", "Library", "Matrix", "Timer", "Playlist", "Inventory", "Point", "Fraction", "Graph", "Deck", "Temperature", "Student", "Robot", "Menu", "LinkedList"),
    "members": (
        "the methods add, remove and find", "a method that prints a summary", "the operators + and ==", "a length and an iterator", "the methods load and save", "a property that is computed once", "the methods start, stop and reset",
        "two attributes and a method that compares them", "a class method that reads a text",
    ),
    "thing_code": ("a bank account", "a traffic light", "a parking garage", "a shopping basket", "a binary tree", "a cache with a limit", "a chess board", "a thermostat", "a ticket machine", "an address book"),
    "feature": (
        "list comprehensions", "decorators", "generators", "the with statement", "dataclasses", "lambda functions", "exceptions", "slicing", "sets", "f-strings", "default arguments", "recursion", "zip and enumerate", "abstract classes",
        "type hints", "*args and **kwargs", "the walrus operator", "context managers", "inheritance", "named tuples", "the GIL", "virtual environments", "async and await", "sorting with a key",
    ),
    "script": (
        "renames all files of a folder", "reads a CSV file and prints the sum of a column", "counts the words of all text files in a folder", "asks for a number until it is guessed", "downloads nothing, but checks whether a port is open",
        "writes a table of squares to a file", "finds duplicate files", "prints a calendar of a month", "converts JSON to CSV", "simulates a thousand throws of a die", "backs up a folder with the date in its name", "draws a triangle of stars",
    ),
    "howto": (
        "read a file line by line", "sort a dictionary by its values", "remove an element from a list while going through it", "measure how long a function takes", "format a number with two decimals", "join two lists without duplicates",
        "check whether a key exists", "make a copy of a nested list", "read arguments of the command line", "catch more than one exception", "generate a random password", "parse a date", "count elements", "write a log file",
    ),
    "query": (
        "returns the ten customers with the most orders", "counts the orders per month", "finds products that were never sold", "shows the average salary per department", "lists names that occur more than once", "joins orders with their customers",
        "deletes rows older than a year", "adds a column with a default value", "finds the second highest price", "shows each employee with the name of the manager",
    ),
    "shell": (
        "finds all files larger than 100 MB", "counts the lines of all Python files", "shows the ten largest folders", "replaces a word in many files", "prints the third column of a file", "kills the process that listens on a port", "packs a folder",
        "shows the last lines of a log as they come", "lists files changed today", "renames all .jpeg files to .jpg",
    ),
    "program": (
        "x = [{n1}, {n1}, {n1}]\ny = x\ny.append({n1})\nprint(len(x), sum(y))", "total = 0\nfor i in range({n1}):\n    if i % 2:\n        total += i\nprint(total)", "words = ['{color}', '{color}', '{color}']\nprint({{len(w): w for w in words}})",
        "def f(n):\n    return n if n < 2 else f(n - 1) + f(n - 2)\n\n\nprint(f({n1}))", "a, b = {n2}, {n2}\nwhile b:\n    a, b = b, a % b\nprint(a)", "text = '{color} and {color}'\nprint(text[::-1].upper().split()[0])",
        "def g(items=[]):\n    items.append({n1})\n    return items\n\n\ng()\nprint(g())", "print([x * y for x in range({n1}) for y in (1, {n1}) if x != y])", "d = {{'a': {n1}, 'b': {n1}}}\nd['c'] = d.pop('a') + d.get('z', {n1})\nprint(sorted(d.items()))",
        "s = set()\nfor c in '{color}{color}':\n    s.add(c)\nprint(len(s))", "class A:\n    n = {n1}\n\n    def __init__(self):\n        self.n += 1\n\n\nprint(A().n, A.n)", "it = iter(range({n1}))\nprint(list(zip(it, it)))",
    ),
    "broken": (
        "def average(values):\n    total = 0\n    for v in values:\n        total =+ v\n    return total / len(values)", "def is_even(n):\n    if n % 2 = 0:\n        return True\n    return False", "def last(items):\n    return items[len(items)]",
        "def count(text, letter):\n    n = 0\n    for c in text:\n        if c is letter:\n            n += 1\n        return n", "numbers = [1, 2, 3]\nfor i in range(1, len(numbers) + 1):\n    print(numbers[i])", "def area(r):\n    return 3.14 * r ^ 2",
        "def find(items, x):\n    for i in range(len(items)):\n        if items[i] == x:\n            return i\n        else:\n            return -1", "age = input('Age: ')\nif age > 17:\n    print('adult')", "def double(items):\n    for item in items:\n        item = item * 2\n    return items",
        "def greet(name='you')\n    print('Hello ' + name)", "result = []\nfor x in [3, 1, 2]:\n    result = result.append(x)\nprint(result)", "while True:\n    n = int(input())\n    if n == 0:\n        continue\n    print(10 / n)",
    ),
    "color": ("red", "green", "blue", "amber", "violet", "grey", "orange", "pink"),
    # --- texts to work on --------------------------------------------------------------------------------
    "rewrite": (
        "Rewrite this text in a friendlier tone:\n\n{text}", "Correct the spelling and grammar:\n\n{sloppy}", "Make this text shorter:\n\n{text} {text}", "Rewrite the following in the past tense:\n\n{text}", "Write this in simple words:\n\n{text}",
        "{text}\n\nPlease make this sound more formal.", "Change every 'I' to 'we' in this text:\n\n{text}", "Turn these notes into full sentences:\n\n{notes}", "Improve the style of this paragraph and keep its meaning:\n\n{text} {text}",
        "Put this text into the third person.\n\n{text}", "Rewrite this email so that it sounds polite:\n\n{text}", "{text}\n\nSay the same in half as many words.", "Split the long sentences of this text:\n\n{text}", "Rewrite as a letter:\n\n{text}",
        "Copy the text and correct only the commas:\n\n{sloppy}", "Replace the dates by weekdays and leave the rest as it is:\n\n{text}", "Make this note suitable for a notice board:\n\n{text}", "Translate this into plain language for new colleagues:\n\n{text} {text}",
    ),
    "summary": (
        "Summarize this text in {few} sentences:\n\n{text} {text} {text}", "What is this text about?\n\n{text} {text}", "Give me the main points:\n\n{text} {text} {text}", "{text} {text}\n\nSummarize this in one sentence.", "Write a headline for this:\n\n{text} {text}",
        "What do I have to do, according to this message?\n\n{text} {text}", "Sum up the following for somebody in a hurry:\n\n{text} {text} {text}", "Which dates and numbers does this text contain, and what do they mean?\n\n{text} {text}", "{text} {text} {text}\n\nWhat are the three most important things here?",
    ),
    "text": (
        "{line} {line} {line}", "{line} {line} {line} {line}", "{line} {line} {closing}", "{opening} {line} {line} {closing}", "{opening} {line} {line} {line}",
    ),
    "sloppy": (
        "i has {n2} {goods} in my room and they is all from the {shop}. my brother dont like it. he say we should sold them", "Yesterday we goes to the lake but the whether was bad so we was sitting in the car and eat are sandwiches",
        "Their is to many people in the train, I hope it get better next weak. {name} tell me she have the same problem", "me and {name} wants to make {event} but we not know how much peoples will coming. its in {few} days",
        "the customer have send back the {goods} because they was broke. we must to pay him {n3} euros untill friday", "Dear Mr. Miller i write you becuase the {tool} what i orderd did not came. Please sent it tomorow or give me my money back",
    ),
    "notes": (
        "- {event}, Saturday\n- {few} guests, one vegetarian\n- {name} brings {food}\n- budget {n3} euros", "{matter}\ncalled twice, nobody there\nnext try: Monday, {n1} o'clock", "meeting: {name}, {name}, me\ntopic: {matter}\ndecided: wait until May\nopen: costs, about {n3} euros",
        "{topic}, talk of {n2} minutes\nintro, three examples, questions\nslides by Thursday\n{name} checks the numbers",
    ),
    "opening": ("Dear {name},", "Hello everybody,", "To all members:", "Hi {name},", "Dear neighbours,", "Good morning,"),
    "closing": ("Many thanks for your help.", "Please tell me by Friday whether that suits you.", "If you have questions, call me after six.", "Best wishes, {name}", "I look forward to your answer.", "Until then we have to be patient."),
    "line": (
        "The {shop} opened {n2} years ago in an old tram depot, and since then it has moved twice.", "On Monday a lorry lost its load of {goods} near the bridge, and the road was closed for {few} hours.", "I wanted to tell you that {matter} is still on my list.",
        "Last year the club had {n3} members, {n2} of them children.", "The council will decide in March whether the swimming pool stays open.", "My colleague {name} has worked here since spring and knows the old machines better than I do.", "The river rose by {n2} centimetres during the night, but the cellar stayed dry.",
        "We ordered {n3} {goods} and got {n2} fewer than that.", "If it rains, the rehearsal takes place in the hall of the school.", "The new line runs every {n2} minutes and stops at the hospital.", "In the old days people here lived on {topic} and a little trade.", "Researchers counted {n3} nests on the island, more than ever before.",
        "The heating will be switched off for maintenance on Tuesday between nine and noon.", "{person} told me about {topic}, and I have not stopped thinking about it since.", "Whoever wants to take part should write down name and telephone number on the list in the hall.", "The results of the survey surprised us: only {n2} percent use the car park at all.",
        "After the storm, {few} trees had to be cut down along the avenue.", "The book tells the story of {hero} who {deed}.", "At first nobody believed in the plan, because the money had run out twice before.", "The museum shows {goods} from four centuries and lends some of them to schools.", "Since the bakery closed, one has to drive {n2} kilometres for fresh bread.",
        "The team measured the temperature every hour and found that it fell fastest before sunrise.", "We would be glad if you could send us the signed form by the end of the week.", "There will be coffee and cake, and whoever likes can bring {food}.", "The workshop costs {n2} euros, and the material is included.", "She had packed the suitcase three days before, and now the key was missing.",
    ),
}  # fmt: skip


def compose(category: str, chance: random.Random) -> str:
    """Return a prompt of a category, one of `PARTS` that prompts begin with."""
    text = _fill(category, chance)
    return re.sub(r"[ \t]+(?=\n|$)", "", re.sub(r"(?<=\S) {2,}", " ", text)).strip()


def _fill(part: str, chance: random.Random) -> str:
    if re.fullmatch(r"n[123]", part):
        digits = int(part[1])
        return str(chance.randint(max(2, 10 ** (digits - 1)), 10**digits - 1))
    chosen = chance.choice(PARTS[part])
    filled = _SLOT.sub(lambda slot: _fill(slot[1], chance), chosen.replace("{{", "\0").replace("}}", "\1"))
    return filled.replace("\0", "{").replace("\1", "}")
